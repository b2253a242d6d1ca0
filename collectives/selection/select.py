"""Which algorithm runs when the caller names none, whether a named one can run at all, and why.

A caller names an algorithm as text, with options if it likes: "ring", "pipeline(segments=8)".  The
answer depends only on what all ranks know alike, so all ranks give the same.  A named algorithm is
never replaced by another: it runs, or the call is refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from collectives.algorithms import Algorithm, registry
from collectives.arrays import Operator
from collectives.programs import num_lanes
from collectives.schedule import SPECS
from collectives.selection.decisions import Decisions, size_range
from collectives.selection.labels import NamedAlgorithm, parse_label

SEGMENT_BYTES = 256 * 1024
_MAX_SEGMENTS = 256
_MAX_PROVED = 2**14  # pieces times ranks of a proof in the middle of a call, which takes 0.3 s

_NO_LIMIT = float("inf")


class _Rule(NamedTuple):
    """Up to `largest` bytes (n), and so many ranks, this algorithm.

    `powers_of_two_only`: only if p is a power of two.
    """

    largest: float
    name: str
    powers_of_two_only: bool = False
    max_ranks: float = _NO_LIMIT


# Bytes that Open MPI sends at once between two processes; of more it tells the receiver first.
_EAGER_BYTES = 4000

# Where nothing was measured.  The first that fits and serves is taken.  What combines in another
# order than that of ranks serves no operator that needs the order; the last one always does.  Those
# for few ranks were measured on 2 and 4, on two cores, with Open MPI and MPICH.
_RULES: dict[str, Sequence[_Rule]] = {
    "broadcast": (
        _Rule(_NO_LIMIT, "binomial", max_ranks=2),
        _Rule(_NO_LIMIT, "knomial", max_ranks=4),
        _Rule(512 * 1024, "binomial"),
        _Rule(_NO_LIMIT, "pipeline"),
    ),
    "reduce": (
        _Rule(8 * 1024**2, "binomial", max_ranks=2),
        _Rule(_NO_LIMIT, "reduce_scatter_gather", max_ranks=2),
        _Rule(_NO_LIMIT, "binary", max_ranks=4),
        _Rule(_NO_LIMIT, "binomial"),
        _Rule(_NO_LIMIT, "in_order_binary"),
    ),
    "all_reduce": (
        _Rule(_EAGER_BYTES, "recursive_doubling", max_ranks=2),
        _Rule(2 * _EAGER_BYTES, "ring", max_ranks=2),  # whose messages are half as long
        _Rule(96 * 1024, "recursive_doubling", max_ranks=2),
        _Rule(_NO_LIMIT, "ring", max_ranks=2),
        _Rule(48 * 1024, "recursive_doubling"),
        _Rule(512 * 1024, "rabenseifner", powers_of_two_only=True),
        _Rule(96 * 1024, "recursive_doubling"),
        _Rule(_NO_LIMIT, "ring"),
        _Rule(_NO_LIMIT, "two_shot"),
    ),
    "scatter": (
        _Rule(_NO_LIMIT, "linear_bounded", max_ranks=4),
        _Rule(32 * 1024, "binomial"),
        _Rule(_NO_LIMIT, "linear"),
    ),
    "gather": (
        _Rule(32 * 1024, "linear_bounded", max_ranks=4),
        _Rule(32 * 1024, "binomial"),
        _Rule(_NO_LIMIT, "linear"),
    ),
    "all_gather": (
        _Rule(1024**2, "recursive_doubling", powers_of_two_only=True),
        _Rule(32 * 1024, "bruck"),
        _Rule(_NO_LIMIT, "ring"),
    ),
    "reduce_scatter": (
        _Rule(256 * 1024, "recursive_halving", powers_of_two_only=True),
        _Rule(32 * 1024, "circulant"),
        _Rule(_NO_LIMIT, "ring"),
        _Rule(_NO_LIMIT, "butterfly"),
    ),
    "all_to_all": (
        _Rule(_NO_LIMIT, "linear", max_ranks=4),
        _Rule(1024, "bruck"),
        _Rule(_NO_LIMIT, "linear"),
    ),
    "scan": (_Rule(_NO_LIMIT, "linear", max_ranks=4), _Rule(_NO_LIMIT, "doubling")),
    "exscan": (_Rule(_NO_LIMIT, "linear", max_ranks=4), _Rule(_NO_LIMIT, "min_round")),
    "barrier": (_Rule(_NO_LIMIT, "dissemination"),),
}


class Choice(NamedTuple):
    """An algorithm, its options, and in words why it was chosen.

    `label`: as a caller names it, with options only if given.  `segments`: into how many messages
    the engine cuts every message of the algorithm.
    """

    algorithm: Algorithm
    options: Mapping[str, int]
    label: str
    reason: str
    segments: int


def choose(
    collective: str,
    text: str | None,
    size: int,
    num_bytes: int,
    operator: Operator | None = None,
    decisions: Decisions | None = None,
) -> Choice:
    """Return the `Choice` of a call: its algorithm and options, and the reason.

        collectives.choose("all_reduce", None, size=4, num_bytes=1 << 20).label    # "ring"

    - `collective`: its name.
    - `text`: the algorithm that the caller names, such as "pipeline(segments=8)"; None: chosen by
      size.
    - `size`: the number of ranks.
    - `num_bytes`: the n of the formulas: bytes of the whole vector.
    - `operator`: of a reduction; one that does not commute needs an algorithm that keeps the order.
    - `decisions`: what was measured, which counts before the built-in rules; None: only the rules.

    Raises TypeError or ValueError if there is no such algorithm, or if it cannot serve.
    """
    if text is not None:
        found, reason = check(collective, text, size, operator), "named by the caller"
    else:
        is_free = operator is None or operator.is_commutative
        limits = _limits(collective, decisions)
        limit = limits[bisect_left(limits, num_bytes)]
        found, reason = _default(collective, size, limit, is_free, decisions, registry.generation())
    chosen = {**options(found.algorithm, size, num_bytes), **found.options}
    segments = num_lanes(found.algorithm, size, num_bytes, tuple(chosen.items()))
    return Choice(found.algorithm, chosen, found.label, reason, segments)


@lru_cache(maxsize=256)
def _limits(collective: str, decisions: Decisions | None) -> list[float]:
    """The sizes at which another choice may begin, in order: between two of them all are alike."""
    limits = {rule.largest for rule in _RULES[collective]}
    return sorted(limits.union(() if decisions is None else decisions.limits(collective)))


@lru_cache(maxsize=1024)
def _default(
    collective: str,
    size: int,
    num_bytes: float,
    is_free: bool,
    decisions: Decisions | None,
    generation: int,
) -> tuple[NamedAlgorithm, str]:
    """As measured, else by the rules, and why.  `is_free`: the order of combining does not matter.

    `generation`: which algorithms the names that were measured stand for.
    """
    measured = () if decisions is None else decisions.ranked(collective, size, num_bytes)
    for label, reason in chain(measured, _by_rules(collective, size, num_bytes)):
        found = parse_label(collective, label)
        if found.serves(size) and (is_free or found.algorithm.is_ordered):
            return found, reason
    raise AssertionError(f"no rule for {collective} covers {num_bytes} bytes on {size} ranks")


def _by_rules(collective: str, size: int, num_bytes: float) -> Iterator[tuple[str, str]]:
    """The algorithms of the built-in rules that fit, best first, and in words which rule it is."""
    is_power = size.bit_count() == 1
    applicable = [
        rule
        for rule in _RULES[collective]
        if size <= rule.max_ranks and (is_power or not rule.powers_of_two_only)
    ]
    for rule in applicable:
        if num_bytes <= rule.largest:
            sizes = size_range(rule.largest, num_bytes, [rule.largest for rule in applicable])
            yield rule.name, f"built-in rule: {sizes}"


def options(algorithm: Algorithm, size: int, num_bytes: int) -> dict[str, int]:
    """The options that depend on n: what has segments gets such as stay in cache.

    Of a registered algorithm every number of segments has to be proved, so there are few numbers
    to choose from, and none so large that the proof takes long.
    """
    if "segments" not in algorithm.options:
        return {}
    num_parts = algorithm.case(size, segments=1).num_pieces  # before they are cut into segments
    if not SPECS[algorithm.collective].has_pieces:
        num_parts *= size
    segments = max(1, -(-num_bytes // (SEGMENT_BYTES * num_parts)))
    if algorithm.is_built_in:
        return {"segments": min(segments, _MAX_SEGMENTS)}
    power_of_two = 1 << (segments - 1).bit_length()
    most = min(_MAX_PROVED // (size * num_parts), _MAX_SEGMENTS)
    return {"segments": max(1, min(power_of_two, most))}


# A named algorithm


def check(
    collective: str, text: str, size: int, operator: Operator | None = None
) -> NamedAlgorithm:
    """The algorithm named.  Raises TypeError or ValueError if there is none or it cannot serve."""
    found = parse_label(collective, text)
    if (restriction := restriction_of(found, size, operator)) is not None:
        raise ValueError(f"{collective} by {found.label} {restriction}")
    return found


def restriction_of(
    found: NamedAlgorithm, size: int, operator: Operator | None = None
) -> str | None:
    """Why an algorithm cannot serve so many ranks or this operator, in words; None if it can."""
    algorithm = found.algorithm
    if not found.serves(size):
        return f"serves {algorithm.ranks_in_words} only, not {size}"
    if operator is not None and not (operator.is_commutative or algorithm.is_ordered):
        return f"needs a commutative operator; {operator.name} is not"
    return None


# What stands for calls that name none

# (collective, label), the innermost first.
_preferred: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("preferred", default=())
preferences = _preferred.get  # all of them, hashable


@contextmanager
def using(**algorithms: str) -> Iterator[None]:
    """Choose the algorithms of calls inside a `with` block that name none.

        with collectives.using(all_reduce="ring", broadcast="pipeline(segments=8)"):
            ...

    `algorithms`: for each collective, an algorithm as a call names it.  All ranks use the same.  Of
    nested blocks the inner one counts.  The choice belongs to the thread (or task) that makes it;
    what the library sends for itself is not affected.

    Returns a context manager.  Raises ValueError for an unknown collective or algorithm.  If an
    algorithm cannot serve a call, that call raises ValueError, as if it had named it.
    """
    labels = [
        (collective, parse_label(collective, text).label) for collective, text in algorithms.items()
    ]
    token = _preferred.set((*labels, *_preferred.get()))
    try:
        yield
    finally:
        _preferred.reset(token)


def preferred(collective: str) -> str | None:
    """The algorithm that stands for calls which name none; None: choose."""
    return next((label for name, label in _preferred.get() if name == collective), None)
