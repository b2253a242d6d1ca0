"""A collective call, as the ranks of a host describe it to each other."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from collectives.lowering import DeviceProgram, lower
from collectives.programs import Aliasing, CallSpec, compile_call

_LOCK = threading.Lock()


class DeviceCall(NamedTuple):
    """A call that can run on devices.  `plan`: the number of the plan that it belongs to, or 0."""

    spec: CallSpec
    plan: int = 0

    def lowered(
        self,
        aliasings: Sequence[Aliasing],
        ranks: Collection[int],
        staged: frozenset[tuple[int, int]],
    ) -> list[DeviceProgram]:
        """The device programs of the ranks of this host, from a cache of bounded size."""
        spec = self.spec._replace(shape=None, label="", blocking="", out="", chosen="")
        if len(ranks) == len(aliasings) and not staged:
            spec = spec._replace(segments=1)
        with _LOCK:  # or ranks that are threads would all do the same work
            return _lowered(spec, tuple(aliasings), frozenset(ranks), staged)

    def num_scratch(self, rank: int, size: int) -> int:
        """The bytes of scratch that a rank needs, whether or not its reduction is cut into lanes.

        Lanes hide the time of messages; ranks that read each other's memory do without.
        """
        specs = self.spec, self.spec._replace(segments=1)
        return max(compile_call(spec, rank, size).num_scratch for spec in specs)

    @property
    def text(self) -> str:
        """The call, for errors about calls that differ."""
        spec = self.spec
        counts = str(spec.counts)
        counts = counts if len(counts) < 60 else f"{counts[:56]} ..."
        op = "" if spec.op is None else f", {spec.op.name}"
        return f"{spec.collective} ({spec.chosen}) of {counts} {spec.dtype}{op}, root {spec.root}"

    @property
    def digest(self) -> bytes:
        """What is equal on all ranks that make the same call."""
        spec = self.spec
        parts = spec.collective, spec.algorithm.name, spec.options, spec.segments, spec.counts
        whole = *parts, spec.dtype.str, spec.root, spec.op and spec.op.name, self.plan
        return blake2b(repr(whole).encode(), digest_size=16).digest()


@lru_cache(maxsize=128)
def _lowered(
    spec: CallSpec,
    aliasings: tuple[Aliasing, ...],
    ranks: frozenset[int],
    staged: frozenset[tuple[int, int]],
) -> list[DeviceProgram]:
    size = len(aliasings)
    programs = [
        compile_call(spec._replace(aliasing=aliasings[rank]), rank, size) if rank in ranks else None
        for rank in range(size)
    ]
    return lower(programs, aliasings, staged=staged, is_barrier=spec.collective == "barrier")
