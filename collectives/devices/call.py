"""A collective call, as the ranks of a host describe it to each other."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from collectives.lowering import DeviceProgram, lower
from collectives.programs import Aliasing, CallSpec, Program, compile_call

_LOCK = threading.Lock()


class DeviceCall(NamedTuple):
    """A call that can run on devices.

    Attributes
    ----------
    spec : CallSpec
        The call, with what runs if ranks read each other's memory, and what runs if it is staged.
    plan : int
        The number of the plan that it belongs to, or 0.
    """

    spec: CallSpec
    plan: int = 0

    def direct_program(self, rank: int, size: int) -> Program:
        """Return the program of a rank in a call in which ranks read each other's memory."""
        return compile_call(self.spec.if_direct, rank, size)

    def staged_program(self, rank: int, size: int) -> Program:
        """Return the program of a rank if the call is staged, or a rank has a host array."""
        return compile_call(self.spec, rank, size)

    def lowered(
        self,
        aliasings: Sequence[Aliasing],
        ranks: Collection[int],
        staged: frozenset[tuple[int, int]],
    ) -> list[DeviceProgram]:
        """Return the device programs of the ranks of this host, from a cache of bounded size."""
        spec = self.spec.if_direct._replace(shape=None, label="", blocking="", out="", chosen="")
        if len(ranks) == len(aliasings) and not staged:
            spec = spec._replace(segments=1)
        with _LOCK:  # or ranks that are threads would all do the same work
            return _lowered(spec, tuple(aliasings), frozenset(ranks), staged)

    def num_scratch(self, rank: int, size: int, staged: frozenset[tuple[int, int]] | None) -> int:
        """Return the bytes of scratch that a rank needs, unless all messages are staged.

        The messages of the pairs of ranks in `staged` are staged; it is None if they are not known
        yet, or some ranks are on other hosts.  If there are none, data is read where it lies, and
        most calls need no scratch.  What this rank does in its own scratch does not depend on where
        the outputs of other ranks lie.
        """
        if staged is None or staged:  # a call that is cut into lanes needs more or less
            direct = self.spec.if_direct
            specs = direct, direct._replace(segments=1)
            return max(compile_call(spec, rank, size).num_scratch for spec in specs)
        aliasings: list[Aliasing] = ["none"] * size
        aliasings[rank] = self.spec.aliasing
        return self.lowered(aliasings, range(size), staged)[rank].num_scratch(rank)

    @property
    def text(self) -> str:
        """The call, for errors about calls that differ."""
        spec = self.spec
        counts = str(spec.counts)
        counts = counts if len(counts) < 60 else f"{counts[:56]} ..."
        op = "" if spec.op is None else f", {spec.op.name}"
        chosen = spec.chosen
        if spec.direct is not None:
            chosen = f"{spec.direct.chosen}, staged {chosen}"
        return f"{spec.collective} ({chosen}) of {counts} {spec.dtype}{op}, root {spec.root}"

    @property
    def digest(self) -> bytes:
        """What is equal on all ranks that make the same call."""
        spec, direct = self.spec, self.spec.if_direct
        ways = [(way.algorithm.name, way.options, way.segments) for way in (spec, direct)]
        parts = spec.collective, *ways, spec.counts, spec.dtype.str, spec.root
        whole = *parts, spec.op and spec.op.name, self.plan
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
