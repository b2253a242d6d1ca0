"""Labels of algorithms: texts that are written like a call, "ring" or "pipeline(segments=8)"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from collectives import algorithms
from collectives.algorithms import Algorithm, registry

_CALL = re.compile(r"([^()]+)(?:\(([^()]*)\)\s*)?")
_OPTION = re.compile(r"\s*(\w+)\s*=\s*(-?\d+)\s*", re.ASCII)
_MAX_DIGITS = 1000  # Python does not convert longer texts into an int


class NamedAlgorithm(NamedTuple):
    """An algorithm and the options given with its name.

    `label` is the text in its normal form, with the options that were given.
    """

    algorithm: Algorithm
    options: Mapping[str, int]
    label: str

    def serves(self, size: int) -> bool:
        """Return whether it can run with these options on `size` ranks."""
        return self.algorithm.serves(size, **self.options)


def parse_label(collective: str, text: str) -> NamedAlgorithm:
    """Return the algorithm that a text names.

    Raises TypeError if `text` is not a text, and ValueError if it names no algorithm.
    """
    if not isinstance(text, str):
        raise TypeError(f"algorithm must be a name or None, not {text!r}")
    return _parse(collective, text, registry.generation())


def parse_default(collective: str, text: str) -> NamedAlgorithm:
    """Return the algorithm that a text names for calls whose `x` has no logical shards.

    Whatever chooses for such calls (a caller, a file of measurements, a rule) passes through here.
    Raises what `parse_label` raises, and ValueError for a number of shards: the program would look
    for all shards in `x`.
    """
    named = parse_label(collective, text)
    if shards := named.options.get("shards"):
        raise ValueError(
            f"{collective} by {named.label} needs shards={shards}, and an x with shards"
        )
    return named


@lru_cache(maxsize=256)
def _parse(collective: str, text: str, generation: int) -> NamedAlgorithm:
    name, given = _parsed(text)
    algorithm = algorithms.info(collective, name)
    algorithm.check_options(given)
    listed = [f"{option}={given[option]}" for option in algorithm.options if option in given]
    return NamedAlgorithm(algorithm, given, f"{name}({', '.join(listed)})" if listed else name)


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
        if len(option[2]) > _MAX_DIGITS:
            raise ValueError(f"algorithm {call[1].strip()!r}: {option[1]} is too large")
        given[option[1]] = int(option[2])
    return call[1].strip(), given
