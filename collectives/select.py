"""Which algorithm runs when the caller names none, and whether a named one can run at all.

The answer depends only on what all ranks know alike, so all ranks give the same.  A named algorithm
is never replaced by another: it runs, or the call is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectives import algorithms
from collectives.algorithms import Algorithm
from collectives.reduction import Operator

SEGMENT_BYTES = 256 * 1024
_MAX_SEGMENTS = 256

# (largest n in bytes, algorithm), in order; the first that fits and serves is taken.
_EVER = float("inf")
_RULES: dict[str, Sequence[tuple[float, str]]] = {
    "broadcast": ((512 * 1024, "binomial"), (_EVER, "chain")),
    "reduce": ((_EVER, "binomial"),),
    "all_reduce": ((32 * 1024, "recursive_doubling"), (_EVER, "ring")),
    "scatter": ((32 * 1024, "binomial"), (_EVER, "linear")),
    "gather": ((32 * 1024, "binomial"), (_EVER, "linear")),
    "all_gather": (
        (32 * 1024, "recursive_doubling"),
        (32 * 1024, "bruck"),
        (_EVER, "ring"),
    ),
    "reduce_scatter": ((32 * 1024, "recursive_halving"), (_EVER, "ring")),
    "all_to_all": ((1024, "bruck"), (_EVER, "linear")),
    "barrier": ((_EVER, "dissemination"),),
}


def choose(
    collective: str, name: str | None, size: int, num_bytes: int, operator: Operator | None
) -> Algorithm:
    """The algorithm to run.  Raises ValueError if the one named is unknown or cannot serve."""
    if name is not None:
        return check(collective, name, size, operator)
    for largest, candidate in _RULES[collective]:
        algorithm = algorithms.info(collective, candidate)
        if num_bytes <= largest and _objection(algorithm, size, operator) is None:
            return algorithm
    raise AssertionError(f"no rule for {collective} covers {num_bytes} bytes on {size} ranks")


def options(algorithm: Algorithm, num_bytes: int) -> dict[str, int]:
    """The options to run it with: a pipeline gets segments that stay in cache."""
    if "segments" not in algorithm.options:
        return {}
    return {"segments": min(max(1, -(-num_bytes // SEGMENT_BYTES)), _MAX_SEGMENTS)}


def check(collective: str, name: str, size: int, operator: Operator | None = None) -> Algorithm:
    """The algorithm of this name.  Raises ValueError if there is none or it cannot serve."""
    algorithm = algorithms.info(collective, name)
    if (objection := _objection(algorithm, size, operator)) is not None:
        raise ValueError(f"{collective} by {name} {objection}")
    return algorithm


def _objection(algorithm: Algorithm, size: int, operator: Operator | None) -> str | None:
    if not algorithm.serves(size):
        return f"serves {algorithm.ranks} ranks only, not {size}"
    if operator is not None and not (operator.is_commutative or algorithm.is_ordered):
        return f"needs a commutative operator; {operator.name} is not"
    return None
