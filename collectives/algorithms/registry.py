"""The registry: what every algorithm states about itself, in a form that can be counted against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from types import CodeType
from typing import Any, Literal, TypeVar

from collectives.schedule import Round, Schedule
from collectives.spec import SPECS
from collectives.trees import ceil_log2, floor_log2

Ranks = Literal["any", "power of two"]
Function = TypeVar("Function", bound=Callable[..., Iterator[Round]])


class Formula:
    """A closed formula, written as an expression and evaluated in exact arithmetic.

    Variables: p ranks, n bytes, q = ceil(log2 p), k = floor(log2 p), P = 2**k, N segments.
    Functions: sum, range, min, max, popcount.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._code: CodeType = compile(text, f"<formula {text}>", "eval")

    def __call__(self, p: int, n: int = 0, segments: int = 1) -> int | Fraction:
        """The value for `p` ranks, `n` bytes and `segments` segments; an int where it is whole."""
        logs = {"q": ceil_log2(p), "k": floor_log2(p), "P": 1 << floor_log2(p)}
        values = {"p": p, "n": Fraction(n), "N": segments, **logs}
        value = Fraction(eval(self._code, dict(_FUNCTIONS), values))
        return int(value) if value.denominator == 1 else value

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Formula({self.text!r})"


_FUNCTIONS: dict[str, Any] = {
    "__builtins__": {},
    "sum": sum,
    "range": range,
    "min": min,
    "max": max,
    "popcount": int.bit_count,
}


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of one collective, and what it promises.

    `ranks`: the numbers of ranks it serves.  `is_ordered`: it combines in rank order, so that the
    operator need not be commutative.  `pieces`: into how many pieces it cuts a vector.
    `rounds`; `messages` and `total`: messages and bytes sent by all ranks together; `busiest`: the
    bytes through the busiest port, that is the most that one rank sends or receives.
    n is the size in bytes of the whole vector; for scatter and gather that of the root's buffer,
    for all-gather that of the result, for all-to-all that of one rank's input.
    `options`: what the function takes beyond rank, size and root, with the defaults.
    """

    collective: str
    name: str
    function: Callable[..., Iterator[Round]]
    rounds: Formula
    messages: Formula
    busiest: Formula
    total: Formula
    pieces: Formula
    ranks: Ranks = "any"
    is_ordered: bool = False
    source: str = ""
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def restrictions(self) -> str:
        """The restrictions in words."""
        order = "any operator" if self.is_ordered else "commutative operators"
        words = [f"{'any' if self.ranks == 'any' else 'a power of two'} number of ranks"]
        return ", ".join(words + [order] * SPECS[self.collective].is_reduction)

    def serves(self, size: int) -> bool:
        """Whether the algorithm can run on `size` ranks."""
        return self.ranks == "any" or size == 1 << floor_log2(size)

    def num_pieces(self, size: int, options: Mapping[str, int]) -> int:
        """How many pieces the vector is cut into."""
        return int(self.pieces(p=size, segments=options.get("segments", 1)))

    def schedule(self, rank: int, size: int, root: int | None = None, **options: int) -> Schedule:
        """The rounds of one rank.  Raises ValueError for what the algorithm cannot serve."""
        self._check(rank, size, root, options)
        where = {"root": root or 0} if SPECS[self.collective].is_rooted else {}
        return list(self.function(rank, size, **where, **options))

    def _check(self, rank: int, size: int, root: int | None, options: Mapping[str, int]) -> None:
        label = f"{self.collective}.{self.name}"
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"{label}: there is no rank {rank} among {size} ranks")
        if root is not None and not SPECS[self.collective].is_rooted:
            raise ValueError(f"{label}: {self.collective} has no root; got root={root}")
        if root is not None and not 0 <= root < size:
            raise ValueError(f"{label}: there is no root {root} among {size} ranks")
        if not self.serves(size):
            raise ValueError(f"{label} serves {self.ranks} ranks, not {size}")
        if unknown := sorted(set(options) - set(self.options)):
            raise ValueError(f"{label} knows no option {unknown[0]!r}; it has {dict(self.options)}")
        if any(value < 1 for value in options.values()):
            raise ValueError(f"{label}: options are at least 1, got {dict(options)}")


REGISTRY: dict[str, dict[str, Algorithm]] = {collective: {} for collective in SPECS}


def algorithm(
    *,
    rounds: str,
    messages: str,
    busiest: str,
    total: str,
    pieces: str = "1",
    **promises: Any,
) -> Callable[[Function], Function]:
    """Enter a function into the registry, under its file's collective and its own name."""

    def decorate(function: Function) -> Function:
        collective = function.__module__.rpartition(".")[2]
        entry = Algorithm(
            collective=collective,
            name=function.__name__,
            function=function,
            rounds=Formula(rounds),
            messages=Formula(messages),
            busiest=Formula(busiest),
            total=Formula(total),
            pieces=Formula(pieces),
            **promises,
        )
        REGISTRY[collective][entry.name] = entry
        return function

    return decorate


def costs_of(collective: str, name: str) -> dict[str, Any]:
    """The formulas of another algorithm: a dual has the same rounds, messages, ports and bytes."""
    other = REGISTRY[collective][name]
    formulas = ("rounds", "messages", "busiest", "total", "pieces")
    return {key: getattr(other, key).text for key in formulas} | {
        "ranks": other.ranks,
        "options": other.options,
    }
