"""Versions of parameters that a later backward needs, if updates do not wait for it."""

from __future__ import annotations

from collections.abc import Mapping

from parallel.accounts import MemoryTracker
from parallel.nn import Array


class WeightStash:
    """Keeps the parameters with which micro-batches in progress were computed forward.

    Narayanan et al. 2019 (PipeDream, weight stashing): backward uses the same version as forward
    did, although the parameters have been updated in between.

    Attributes
    ----------
    version : int
        The number of updates so far.
    versions : dict of int to int
        The version that each micro-batch of the last step was computed with.
    staleness : dict of int to int
        How many updates came between forward of each micro-batch and its own update.
    num_alive : int
        The largest number of versions that were kept at a time, with the current one.
    """

    def __init__(self, memory: MemoryTracker) -> None:
        self.memory, self.version, self.num_alive = memory, 0, 1
        self.versions: dict[int, int] = {}
        self.staleness: dict[int, int] = {}
        self._open: dict[int, int] = {}  # the versions of micro-batches in progress
        self._kept: dict[int, Mapping[str, Array]] = {}

    def parameters_of(self, number: int, current: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the parameters of the forward of a micro-batch, or the `current` parameters."""
        version = self._open.setdefault(number, self.version)
        self.versions[number] = version
        return current if version == self.version else self._kept[version]

    def update(self, number: int, current: Mapping[str, Array]) -> None:
        """Keep the `current` parameters if needed, before the update by a micro-batch changes them.

        Versions that no micro-batch in progress needs are freed.
        """
        self.staleness[number] = self.version - self._open.pop(number)
        needed = set(self._open.values())
        self._kept = {version: x for version, x in self._kept.items() if version in needed}
        if self.version in needed:
            copies = {unit: x.copy() for unit, x in current.items()}
            self._kept[self.version] = self.memory.track("parameters", copies)
        self.version += 1
        self.num_alive = max(self.num_alive, len(self._kept) + 1)
