"""Algorithms from other people's code: proved on registration, then equal to those built in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from collectives.algorithms.registry import (
    COSTS,
    REGISTRY,
    SYMBOLS,
    Algorithm,
    Counted,
    Formula,
    Function,
    Ranks,
    enter,
)
from collectives.count import count, even_sizes
from collectives.schedule import Round
from collectives.spec import SPECS

PROVED_SIZES = range(1, 18)


def register(
    collective: str,
    *,
    name: str | None = None,
    ranks: Ranks = "any",
    is_ordered: bool = False,
    is_bitwise: bool = False,
    options: Mapping[str, int] | None = None,
    pieces: str = "1",
    source: str = "registered by the user",
    **formulas: str,
) -> Callable[[Function], Function]:
    """Add an algorithm: `@register("all_reduce")` above a function that yields its rounds.

    The function takes `rank`, `size`, for a rooted collective `root`, and its options by name; it
    yields for every rank the same number of rounds, tuples of the operations of
    `collectives.schedule`.  Its name is the function's.  `ranks`, `is_ordered`, `is_bitwise` and
    `pieces` are what it promises, see `Algorithm`; `formulas` are texts for `rounds`, `startups`,
    `messages`, `busiest`, `total`, `critical`, `work` (see `Formula`): what has none is counted.

    It is proved for 1 to 17 ranks from all roots, and its formulas are counted, before it is
    entered.  Raises ScheduleError, with the grid and the wrong cell marked, if it is wrong, and
    ValueError for a wrong formula, an unknown collective, option or promise, or a name that is
    taken.
    """
    if collective not in REGISTRY:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(REGISTRY)}")
    if unknown := sorted(set(formulas) - set(COSTS)):
        raise ValueError(f"there is no formula {unknown[0]!r}; known: {', '.join(COSTS)}")
    if unknown := sorted(set(options or {}) - set(SYMBOLS)):
        raise ValueError(f"there is no option {unknown[0]!r}; known: {', '.join(SYMBOLS)}")
    if ranks not in get_args(Ranks):
        raise ValueError(f"ranks must be one of {', '.join(get_args(Ranks))}, got {ranks!r}")

    def decorate(function: Function) -> Function:
        entry = _made(
            collective, name or function.__name__, function, dict(options or {}), pieces, formulas,
            ranks=ranks, is_ordered=is_ordered, is_bitwise=is_bitwise, source=source,
        )  # fmt: skip
        _refuse_taken(entry)
        prove(entry)
        enter(entry)
        return function

    return decorate


def _made(
    collective: str,
    name: str,
    function: Callable[..., Iterator[Round]],
    options: dict[str, int],
    pieces: str,
    formulas: Mapping[str, str],
    **promises: Any,
) -> Algorithm:
    """The entry, with whatever has no formula counted."""
    cut = Formula(pieces, options)
    costs: dict[str, Any] = {
        cost: Formula(formulas[cost], options)
        if cost in formulas
        else Counted(cost, collective, function, options, cut)
        for cost in COSTS
    }
    return Algorithm(
        collective, name, function, **costs, scratch=None, pieces=cut, options=options, **promises
    )


def _refuse_taken(entry: Algorithm) -> None:
    """Only who registered a name may register it again, as in a notebook."""
    taken = REGISTRY[entry.collective].get(entry.name)
    if taken is not None and taken.function.__module__ != entry.function.__module__:
        raise ValueError(f"{entry.collective} has an algorithm {entry.name!r} already")


def prove(entry: Algorithm) -> None:
    """Prove it, and count against its formulas, for every small number of ranks it serves."""
    sizes = [size for size in PROVED_SIZES if entry.serves(size)]
    if len(sizes) < 2:
        raise ValueError(f"{entry.collective} by {entry.name} serves too few numbers of ranks")
    for size in sizes:
        for root in range(size) if SPECS[entry.collective].is_rooted else [None]:
            entry.verify(size, root)
        compare(entry, size)


def compare(entry: Algorithm, size: int, **options: int) -> None:
    """Raise ValueError if a formula states anything but what counting finds.

    Counted from the roots 0 and p/3, of small worlds also p/2 and p-1; a formula states the worst.
    """
    case = entry.case(size, **options)
    n = size * case.num_pieces * (entry.collective != "barrier")
    sizes = even_sizes(entry.collective, case, n)
    places = [0, size // 3, *([size // 2, size - 1] if size <= 16 else [])]
    roots = dict.fromkeys(places if SPECS[entry.collective].is_rooted else [None])
    found = [
        count([entry.schedule(rank, size, root, **options) for rank in range(size)], sizes)
        for root in roots
    ]
    for cost in found[0]._fields:
        formula, most = getattr(entry, cost), max(getattr(counts, cost) for counts in found)
        if isinstance(formula, Formula) and (stated := formula(p=size, n=n, **options)) != most:
            raise ValueError(
                f"{entry.collective} by {entry.name}, {size} ranks, {n} bytes, {options}: "
                f"{cost} is {formula} = {stated}, counted {most}"
            )
