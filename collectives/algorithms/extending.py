"""Register algorithms of users, which are proved and then work like the built-in ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, get_args

from collectives.algorithms.algorithm import DIVISORS, Algorithm, Ranks
from collectives.algorithms.formulas import SYMBOLS, Counted, Formula, Option, arguments
from collectives.algorithms.registry import COSTS, REGISTRY, Function, add
from collectives.schedule import SPECS, Round, ScheduleError, count, even_sizes

PROVED_SIZES = range(1, 18)
# Shards would change the input.
OPTIONS = [option for option in SYMBOLS if option != "shards"]
RANKS = [ranks for ranks in get_args(Ranks) if ranks != "at most shards"]
IN_BYTES = ("max_bytes_per_rank", "total_bytes", "critical_bytes", "reduction_bytes")


def register(
    collective: str,
    *,
    name: str | None = None,
    ranks: Ranks = "any",
    is_ordered: bool = False,
    is_bitwise: bool = False,
    is_invariant: bool = False,
    options: Mapping[str, int] | None = None,
    pieces: str = "1",
    source: str = "registered by the user",
    **formulas: str,
) -> Callable[[Function], Function]:
    """Add an algorithm: a decorator of the function that yields its rounds.

    The function takes `rank`, `size`, for a rooted collective `root`, and its options by name.  For
    every rank it yields the same number of rounds, each a tuple of operations of
    `collectives.schedule`.

    Before the algorithm is entered it is proved for 1 to 17 ranks from all roots, with its default
    options and with each of them one and two higher, and its formulas are compared with counts.
    Any other number of ranks, or value of an option, is proved before the first call that uses it;
    if the proof fails all ranks refuse the call.  An algorithm that was registered before under
    the same name is replaced, as when a cell of a notebook is run again.

    Parameters
    ----------
    collective : str
        The name of the collective.
    name : str, optional
        The name of the algorithm; by default, the function's.
    ranks, is_ordered, is_bitwise, is_invariant, pieces, source
        What the algorithm promises; see `Algorithm`.
    options : mapping of str to int, optional
        The names of its options, with their defaults.  With `per_host` the function takes `hosts`,
        a `collectives.Topology`, instead.
    **formulas : str
        The costs `rounds`, `startups`, `messages`, `max_bytes_per_rank`, `total_bytes`,
        `critical_bytes` and `reduction_bytes`; see `Formula`.  A cost without a formula is counted.

    Returns
    -------
    function
        The decorator, which returns the function unchanged.

    Raises
    ------
    ScheduleError
        If the algorithm is wrong.  The message has the grid with the wrong cell marked.
    ValueError
        For a wrong formula, an unknown collective, option or promise, the name of a built-in
        algorithm, or a schedule that is too long.

    Examples
    --------
    >>> from collectives import algorithms
    >>> from collectives.schedule import Recv, Send
    >>> @algorithms.register("broadcast", rounds="p - 1")
    ... def one_by_one(rank, size, root):
    ...     for peer in range(size):
    ...         if peer != root:
    ...             sends = [Send(peer, [0])] * (rank == root)
    ...             yield (*sends, *[Recv(root, [0])] * (rank == peer))
    >>> str(algorithms.info("broadcast", "one_by_one").messages)
    'counted'
    """
    if collective not in REGISTRY:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(REGISTRY)}")
    if unknown := sorted(set(formulas) - set(COSTS)):
        raise ValueError(f"there is no formula {unknown[0]!r}; known: {', '.join(COSTS)}")
    if unknown := sorted(set(options or {}) - set(OPTIONS)):
        raise ValueError(f"there is no option {unknown[0]!r}; known: {', '.join(OPTIONS)}")
    if ranks not in RANKS:
        raise ValueError(f"ranks must be one of {', '.join(RANKS)}, got {ranks!r}")
    if missing := sorted(set(DIVISORS.get(ranks, ())) - set(options or {})):
        raise ValueError(f"ranks={ranks!r} needs options with {missing[0]}")

    def decorate(function: Function) -> Function:
        label = getattr(function, "__name__", "") if name is None else name
        entry = _made(
            collective,
            label,
            function,
            dict(options or {}),
            pieces,
            formulas,
            ranks=ranks,
            is_ordered=is_ordered,
            is_bitwise=is_bitwise,
            is_invariant=is_invariant,
            source=source,
        )
        _check_names(entry)
        entry = replace(entry, function=_telling_its_rank(function))
        prove(entry)
        add(entry)
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
    """Return the entry; costs without a formula are counted."""
    cut = Formula(pieces, options).checked()
    costs: dict[str, Any] = {
        cost: Formula(formulas[cost], options, is_cost=True).checked()
        if cost in formulas
        else Counted(cost, collective, function, options, cut)
        for cost in COSTS
    }
    return Algorithm(
        collective,
        name,
        function,
        **costs,
        scratch_bytes=None,
        pieces=cut,
        options=options,
        is_built_in=False,
        **promises,
    )


def _telling_its_rank(function: Callable[..., Iterator[Round]]) -> Callable[..., Iterator[Round]]:
    """Return the same function, whose errors become a ScheduleError that names the rank."""

    @wraps(function)
    def rounds(rank: int, size: int, *others: int, **options: Option) -> Iterator[Round]:
        try:
            yield from function(rank, size, *others, **options)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ScheduleError(f"rank {rank} of {size} raises {what}") from error

    return rounds


def _check_names(entry: Algorithm) -> None:
    """Check the name, which must not be a built-in one, and the options of the function."""
    if not isinstance(entry.name, str) or not entry.name.isidentifier():
        raise ValueError(f"an algorithm's name is an identifier, not {entry.name!r}; pass name=")
    entry.check_options(entry.options)
    root = {"root": 0} if SPECS[entry.collective].is_rooted else {}
    signature = inspect.signature(entry.function, follow_wrapped=False)
    try:
        signature.bind(0, 1, **root, **arguments(1, entry.options))
    except TypeError as error:
        raise ValueError(
            f"{entry.name}{signature} cannot be called with rank, size"
            f"{''.join(f', {name}' for name in (*root, *arguments(1, entry.options)))}: {error}"
        ) from None
    taken = REGISTRY[entry.collective].get(entry.name)
    if taken is not None and taken.is_built_in:
        raise ValueError(
            f"{entry.collective} has an algorithm {entry.name!r} already, which is built in; "
            "choose another name"
        )


def prove(entry: Algorithm) -> None:
    """Prove an algorithm and compare its formulas with counts, for small numbers of ranks.

    The options are the defaults, and each of them one and two higher.
    """
    given = {name: value for name, value in entry.options.items() if isinstance(value, int)}
    higher = [{name: value + i} for name, value in given.items() for i in (1, 2)]
    for options in [{}, *higher]:
        sizes = [size for size in PROVED_SIZES if entry.serves(size, **options)]
        if len(sizes) < 2:
            raise ValueError(f"{entry.collective} by {entry.name} serves too few numbers of ranks")
        for size in sizes:
            roots = range(size) if SPECS[entry.collective].is_rooted else [None]
            for root in roots:
                entry.prove(size, root, **options)
            compare(entry, size, roots, **options)


def compare(entry: Algorithm, size: int, roots: Iterable[int | None], **options: int) -> None:
    """Raise ValueError if a formula differs from the count for the worst root."""
    case = entry.case(size, **options)
    n = size * case.num_pieces * (entry.collective != "barrier")
    sizes = even_sizes(entry.collective, case, n)
    by_root = [
        count([entry.schedule(rank, size, root, **options) for rank in range(size)], sizes)
        for root in roots
    ]
    for cost in by_root[0]._fields:
        formula, most = getattr(entry, cost), max(getattr(counts, cost) for counts in by_root)
        # With five times as many bytes, bytes are five times as many, and nothing else is.
        for times in (1, 5) if isinstance(formula, Formula) else ():
            counted = most * times if cost in IN_BYTES else most
            if (stated := formula(p=size, n=n * times, **options)) != counted:
                raise ValueError(
                    f"{entry.collective} by {entry.name}, {size} ranks, {n * times} bytes, "
                    f"{options}: {cost} is {formula} = {stated}, counted {counted}"
                )
