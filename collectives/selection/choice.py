"""What was chosen for a call, and the call of even parts that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from collectives.algorithms import Algorithm, Option
from collectives.programs import CallSpec, Counts, Direct
from collectives.schedule import SPECS, even_counts


class Choice(NamedTuple):
    """An algorithm, its options, and the reason for the choice, as text.

    Attributes
    ----------
    algorithm : Algorithm
    options : mapping of str to int or Topology
    label : str
        The algorithm as a caller names it, with the options that were given.
    reason : str
    segments : int
        The number of messages into which the engine cuts every message of the algorithm.
    """

    algorithm: Algorithm
    options: Mapping[str, Option]
    label: str
    reason: str
    segments: int

    def spec(self, counts: Counts, itemsize: int = 1, root: int = 0) -> CallSpec:
        """Return the description of a call with so many elements of `itemsize` bytes."""
        return CallSpec(
            self.algorithm.collective,
            self.algorithm,
            tuple(self.options.items()),
            self.segments,
            self.label,
            np.dtype(f"V{itemsize}"),
            counts,
            root,
        )

    def direct_beside(self, staged: Choice) -> Direct | None:
        """Return what this choice for devices makes of a call; None if it is what is staged."""
        if (self.algorithm, self.options, self.segments) == (
            *(staged.algorithm, staged.options, staged.segments),
        ):
            return None
        return Direct(self.algorithm, tuple(self.options.items()), self.label)


def even_parts(collective: str, size: int, num_bytes: int) -> Counts:
    """Return the bytes of each part, if all are even; `num_bytes` is the n of the formulas."""
    if SPECS[collective].has_pieces:
        return num_bytes
    parts = even_counts(0 if collective == "barrier" else num_bytes, size)
    return (parts,) * size if collective == "all_to_all" else parts
