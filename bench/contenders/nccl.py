"""NCCL's calls, by CuPy's wrapper: what it lacks, its communicator, and the calls of a case."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from bench.contenders.contender import NCCL, Contender, nothing
from bench.timing.deadline import Guard
from bench.workloads.collective import Buffers, Case
from collectives.arrays.backends import Array, Backend
from collectives.schedule.contracts import SPECS

SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARING = 23000  # the first version in which several ranks can use one GPU: 2.30.0
_WITHOUT = ("scan", "exscan", "barrier")
_Message = tuple[int, int]  # the other rank, and an address


class Nccl:
    """All ranks' communicator of NCCL, and its contenders.

    It is left out from the beginning where NCCL cannot be used, and after its first failure.
    `is_shared` says whether some ranks use the same GPU.
    """

    def __init__(self, backend: Backend, *, is_shared: bool) -> None:
        self._backend = backend
        self._comm: Any = None
        self.guard = Guard(NCCL, backend, self._abort)
        self._library, why = usable(is_shared=is_shared)
        self.guard.leave_out(why)
        if not self.guard.why:
            self._connect()

    def _connect(self) -> None:
        world, library = MPI.COMM_WORLD, self._library
        make_id = library.get_unique_id if world.rank == 0 else nothing
        made = world.bcast(self.guard.attempt(lambda: (make_id(),)))
        if made is not None:
            make = partial(library.NcclCommunicator, world.size, *made, world.rank)
            self._comm = self.guard.attempt(make, is_on_host=True)

    def _abort(self) -> None:
        if self._comm is not None:
            self._comm.abort()

    def free(self) -> None:
        """Free the communicator."""
        if self._comm is not None and not self.guard.why:
            self.guard.attempt(self._comm.destroy)
        self.guard.free()

    def lacks(self, case: Case, *, is_in_place: bool) -> str | None:
        """Return what NCCL lacks for this case, as text, or None."""
        if case.collective in _WITHOUT:
            return case.collective
        if case.counts is not None:
            return "blocks of different sizes"
        if case.collective == "all_to_all" and is_in_place:
            return "all_to_all in place"
        if self._constant(case.dtype.name) is None:
            return f"dtype {case.dtype.name}"
        has_op = not SPECS[case.collective].is_reduction or self._constant(case.op) is not None
        return None if has_op else f"op {case.op}"

    def _constant(self, name: str) -> int | None:
        """Return the number of a dtype or operator."""
        return getattr(self._library, f"NCCL_{name.upper()}", None)

    def contender(self, case: Case, buffers: Buffers) -> Contender:
        """Return a call on the stream that is current now."""
        stream = int(self._backend.current_stream().ptr)
        run = partial(self._call(case, buffers), stream)
        return Contender(run, nothing, buffers.y, self.guard.attempt)

    def _call(self, case: Case, buffers: Buffers) -> Callable[[int], None]:
        """Return the call of a case, which takes a stream."""
        x, y = (address(self._backend, buffer) for buffer in buffers[:2])
        comm, root, block = self._comm, case.root, case.block
        kind, op = self._constant(case.dtype.name), self._constant(case.op)
        calls: dict[str, Callable[[int], None]] = {
            "broadcast": partial(comm.broadcast, y, y, block, kind, root),
            "reduce": partial(comm.reduce, x, y, block, kind, op, root),
            "all_reduce": partial(comm.allReduce, x, y, block, kind, op),
            "reduce_scatter": partial(comm.reduceScatter, x, y, block, kind, op),
            "all_gather": partial(comm.allGather, x, y, block, kind),
        }
        if case.collective in calls:
            return calls[case.collective]
        sends, receives = messages(case, x, y)
        return self._exchange(
            [partial(comm.send, place, block, kind, peer) for peer, place in sends]
            + [partial(comm.recv, place, block, kind, peer) for peer, place in receives]
        )

    def _exchange(self, all_messages: Sequence[Callable[[int], None]]) -> Callable[[int], None]:
        """Return the messages that NCCL has in the place of some collectives, as in nccl-tests."""
        library = self._library

        def run(stream: int) -> None:
            library.groupStart()
            for message in all_messages:
                message(stream)
            library.groupEnd()

        return run


def usable(*, is_shared: bool) -> tuple[Any, str]:
    """Return CuPy's wrapper of NCCL, and why it cannot be used here; "" if it can."""
    try:
        library = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        return None, f"CuPy has no NCCL ({error})"
    if not library.available:
        return None, "CuPy finds no NCCL library"
    version = library.get_version()
    number = f"{version // 10000}.{version // 100 % 100}"
    if is_shared and version < SHARING:
        return None, f"several ranks use one GPU, which takes NCCL 2.30 or newer, not {number}"
    if is_shared and os.environ.get(SWITCH) != "1":
        return None, f"several ranks use one GPU, which NCCL allows only with {SWITCH}=1"
    return library, ""


def address(backend: Backend, x: Array | None) -> int:
    """Return where an array begins; 0 where there is none."""
    return 0 if x is None else backend.extent(x)[0]


def messages(case: Case, x: int, y: int) -> tuple[list[_Message], list[_Message]]:
    """Return what this rank sends and receives; nothing to itself if the block is there already."""
    sends, receives = _blocks(case, x, case.num_in), _blocks(case, y, case.num_out)
    is_there = {send for send in sends if send[0] == case.rank and send in receives}
    return [send for send in sends if send not in is_there], [
        receive for receive in receives if receive not in is_there
    ]


def _blocks(case: Case, start: int, number: int) -> list[_Message]:
    """Return a block for each rank, the only one for the root, or none."""
    num_bytes = case.block * case.dtype.itemsize
    peers = range(case.size) if number == case.size else [case.root] * number
    return [(peer, start + place * num_bytes) for place, peer in enumerate(peers)]
