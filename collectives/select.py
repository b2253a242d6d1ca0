"""Which algorithm runs when the caller names none, and whether a named one can run at all.

A caller names an algorithm as text, with options if it likes: "ring", "pipeline(segments=8)".  The
answer depends only on what all ranks know alike, so all ranks give the same.  A named algorithm is
never replaced by another: it runs, or the call is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from collectives import algorithms
from collectives.algorithms import Algorithm
from collectives.reduction import Operator
from collectives.spec import SPECS

SEGMENT_BYTES = 256 * 1024
_MAX_SEGMENTS = 256

_EVER = float("inf")


class _Rule(NamedTuple):
    """Up to `largest` bytes (n) this algorithm; `is_for_powers`: if p is a power of two."""

    largest: float
    name: str
    is_for_powers: bool = False


# The first that fits and serves is taken.  What combines in another order than that of ranks serves
# no operator that needs the order; the last one always does.
_RULES: dict[str, Sequence[_Rule]] = {
    "broadcast": (_Rule(512 * 1024, "binomial"), _Rule(_EVER, "pipeline")),
    "reduce": (_Rule(_EVER, "binomial"), _Rule(_EVER, "in_order_binary")),
    "all_reduce": (
        _Rule(32 * 1024, "recursive_doubling"),
        _Rule(_EVER, "ring"),
        _Rule(_EVER, "two_shot"),
    ),
    "scatter": (_Rule(32 * 1024, "binomial"), _Rule(_EVER, "linear")),
    "gather": (_Rule(32 * 1024, "binomial"), _Rule(_EVER, "linear")),
    "all_gather": (
        _Rule(32 * 1024, "recursive_doubling", is_for_powers=True),
        _Rule(32 * 1024, "bruck"),
        _Rule(_EVER, "ring"),
    ),
    "reduce_scatter": (
        _Rule(32 * 1024, "recursive_halving", is_for_powers=True),
        _Rule(32 * 1024, "circulant"),
        _Rule(_EVER, "ring"),
        _Rule(_EVER, "butterfly"),
    ),
    "all_to_all": (_Rule(1024, "bruck"), _Rule(_EVER, "linear")),
    "scan": (_Rule(_EVER, "doubling"),),
    "exscan": (_Rule(_EVER, "min_round"),),
    "barrier": (_Rule(_EVER, "dissemination"),),
}


class Choice(NamedTuple):
    """An algorithm and its options.  `label`: as a caller names it, with options only if given."""

    algorithm: Algorithm
    options: Mapping[str, int]
    label: str


def choose(
    collective: str,
    text: str | None,
    size: int,
    num_bytes: int,
    operator: Operator | None = None,
) -> Choice:
    """What a call runs: the algorithm named, or None for a choice by size, and its options.

    `num_bytes` is the n of the formulas.  Raises ValueError if there is no algorithm of this name
    or it cannot serve.
    """
    if text is None:
        is_free = operator is None or operator.is_commutative
        return _default(collective, size, num_bytes, is_free)
    choice = check(collective, text, size, operator)
    chosen = options(choice.algorithm, size, num_bytes)
    return choice._replace(options={**chosen, **choice.options})


@lru_cache(maxsize=1024)
def _default(collective: str, size: int, num_bytes: int, is_free: bool) -> Choice:
    """By the rules.  `is_free`: the order of combining does not matter."""
    for rule in _RULES[collective]:
        algorithm = algorithms.info(collective, rule.name)
        fits = num_bytes <= rule.largest and (size.bit_count() == 1 or not rule.is_for_powers)
        if fits and algorithm.serves(size) and (is_free or algorithm.is_ordered):
            return Choice(algorithm, options(algorithm, size, num_bytes), rule.name)
    raise AssertionError(f"no rule for {collective} covers {num_bytes} bytes on {size} ranks")


def options(algorithm: Algorithm, size: int, num_bytes: int) -> dict[str, int]:
    """The options that depend on n: what has segments gets such as stay in cache."""
    if "segments" not in algorithm.options:
        return {}
    num_parts = algorithm.case(size, segments=1).num_pieces  # before they are cut into segments
    if not SPECS[algorithm.collective].has_pieces:
        num_parts *= size
    return {"segments": min(max(1, -(-num_bytes // (SEGMENT_BYTES * num_parts))), _MAX_SEGMENTS)}


def check(collective: str, text: str, size: int, operator: Operator | None = None) -> Choice:
    """The algorithm named.  Raises TypeError or ValueError if there is none or it cannot serve."""
    if not isinstance(text, str):
        raise TypeError(f"algorithm must be a name or None, not {text!r}")
    choice = named(collective, text)
    if (objection := _objection(choice, size, operator)) is not None:
        raise ValueError(f"{collective} by {choice.label} {objection}")
    return choice


def _objection(choice: Choice, size: int, operator: Operator | None) -> str | None:
    algorithm = choice.algorithm
    if not algorithm.serves(size, **choice.options):
        return f"serves {algorithm.ranks_in_words} only, not {size}"
    if operator is not None and not (operator.is_commutative or algorithm.is_ordered):
        return f"needs a commutative operator; {operator.name} is not"
    return None


# An algorithm as text, written like a call

_CALL = re.compile(r"([^()]+)(?:\(([^()]*)\)\s*)?")
_OPTION = re.compile(r"\s*(\w+)\s*=\s*(-?\d+)\s*", re.ASCII)


def named(collective: str, text: str) -> Choice:
    """The algorithm of this name, and the options given with it.  ValueError if there is none."""
    name, given = _parsed(text)
    algorithm = algorithms.info(collective, name)
    algorithm.check_options(given)
    listed = [f"{option}={given[option]}" for option in algorithm.options if option in given]
    return Choice(algorithm, given, f"{name}({', '.join(listed)})" if listed else name)


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[str, dict[str, int]]:
    call = _CALL.fullmatch(text)
    if call is None:
        raise ValueError(f"algorithm {text!r} is not a name, or one like 'pipeline(segments=8)'")
    given: dict[str, int] = {}
    for part in call[2].split(",") if (call[2] or "").strip() else []:
        option = _OPTION.fullmatch(part)
        if option is None:
            raise ValueError(f"algorithm {text!r}: {part.strip()!r} is not like 'segments=8'")
        if option[1] in given:
            raise ValueError(f"algorithm {text!r} gives {option[1]} twice")
        given[option[1]] = int(option[2])
    return call[1].strip(), given
