"""The contenders of other libraries: on the host MPI's own call, on a device three."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mpi4py import MPI

from bench.contenders.contender import NATIVE, NCCL, THROUGH_HOST, WORKS, Contender, nothing
from bench.contenders.mpi import native, native_lacks, native_on_device, through_host
from bench.contenders.nccl import Nccl
from bench.timing.deadline import Guard
from bench.workloads.collective import Buffers, Case
from collectives import Communicator
from collectives.arrays.backends import Backend
from collectives.devices.drivers import driver_of


class Rival(NamedTuple):
    """A contender of another library."""

    lacks: Callable[..., str | None]  # what the library lacks for a case, in place or not
    make: Callable[[Case, Buffers], Contender]
    guard: Guard | None = None  # where it may hang or fail
    free: Callable[[], None] = nothing

    @property
    def why_left_out(self) -> str:
        """Why it takes no part any more, in no case; "" if it does."""
        return "" if self.guard is None else self.guard.why


class Rivals:
    """The contenders of other libraries that the user wants, by name.  All ranks make it."""

    def __init__(self, options: argparse.Namespace, backend: Backend) -> None:
        self._rivals = rivals(backend, options.device_mpi) if options.native else {}
        self._said: set[str] = set()

    def contenders(self, case: Case, buffers: Buffers) -> dict[str, Contender]:
        """Return those that take part in a case."""
        return {
            name: rival.make(case, buffers)
            for name, rival in self._rivals.items()
            if not rival.why_left_out and not rival.lacks(case, is_in_place=buffers.is_in_place)
        }

    @property
    def left_out(self) -> dict[str, str]:
        """Those that take no part any more, and why."""
        whys = {name: rival.why_left_out for name, rival in self._rivals.items()}
        return {name: why for name, why in whys.items() if why}

    def news(self) -> Iterator[str]:
        """Yield texts on those that are left out, each once."""
        for name, why in self.left_out.items():
            if name not in self._said:
                self._said.add(name)
                yield f"{name}: left out, {why}"

    def lacking(self, cases: Sequence[Case]) -> Iterator[str]:
        """Yield texts on what they lack for some cases."""
        taking_part = {name: r for name, r in self._rivals.items() if not r.why_left_out}
        for name, rival in taking_part.items():
            lacks = (rival.lacks(case, is_in_place=False) for case in cases)
            for lack in dict.fromkeys(filter(None, lacks)):
                yield f"{name}: not measured, there is no {lack}"

    def free(self) -> None:
        """Free what they keep from case to case."""
        for rival in self._rivals.values():
            rival.free()


def rivals(backend: Backend, device_mpi: str) -> dict[str, Rival]:
    """Return the contenders of other libraries by name, in the order in which they are shown."""
    if backend.is_host:
        return {NATIVE: Rival(mpi_lacks, native)}
    nccl = Nccl(backend, is_shared=num_devices(backend) < MPI.COMM_WORLD.size)
    return {
        THROUGH_HOST: Rival(mpi_lacks, through_host),
        NCCL: Rival(nccl.lacks, nccl.contender, nccl.guard, nccl.free),
        NATIVE: on_device(backend, device_mpi),
    }


def mpi_lacks(case: Case, *, is_in_place: bool) -> str | None:
    """Return what MPI lacks for a case."""
    return native_lacks(case)


def on_device(backend: Backend, tried: str) -> Rival:
    """Return MPI's own call on arrays of a device, if another job has tried that and it works."""
    guard = Guard(NATIVE, backend, nothing)
    guard.leave_out("" if tried == WORKS else tried)

    def make(case: Case, buffers: Buffers) -> Contender:
        return native_on_device(case, buffers)._replace(attempt=guard.attempt)

    return Rival(mpi_lacks, make, guard, guard.free)


def num_devices(backend: Backend) -> int:
    """Return how many devices the ranks use, which may give one device different numbers."""
    backend.synchronize()  # or there may be no context yet, which the driver must have
    return len(set(MPI.COMM_WORLD.allgather(driver_of(backend).uuid())))


def links_of(comm: Communicator) -> str:
    """Return the word "peer" if all ranks read each other's memory, else why some do not."""
    links = comm._session.devices._links
    why = "no call was made on a device"
    if links is not None and links.staged is not None:
        why = links.why_any_staged
    return next(filter(None, MPI.COMM_WORLD.allgather(why)), "peer")
