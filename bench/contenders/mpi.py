"""The MPI library's own calls, on the arrays of a case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from bench.contenders.contender import Contender, nothing
from bench.workloads.collective import Buffers, Case
from bench.workloads.expected import Array
from collectives.arrays.backends import HOST
from collectives.arrays.kernels import is_bfloat16
from collectives.mpi4py_compat.ops import OPERATIONS
from collectives.schedule.contracts import SPECS

_OPS_OF_BOOL = {"min": MPI.LAND, "max": MPI.LOR, "and": MPI.LAND, "or": MPI.LOR, "xor": MPI.LXOR}


def native_lacks(case: Case) -> str | None:
    """Return what MPI lacks for this case, as text, or None."""
    if not SPECS[case.collective].is_reduction:
        return None
    if is_bfloat16(case.dtype):
        return "bfloat16"
    return None if case.op in _ops(case) else f"op {case.op}"


def native(case: Case, buffers: Buffers) -> Contender:
    """Return MPI's own call, whose reduce_scatter in place leaves the result at the front."""
    result = buffers.y
    if case.collective == "reduce_scatter" and buffers.is_in_place and buffers.x is not None:
        result = buffers.x[: case.out_counts[0]]
    run = _call(case, *_buffers(case, buffers))
    return Contender(run, nothing, result)


def native_on_device(case: Case, buffers: Buffers) -> Contender:
    """Return the call on arrays of a device, after the current stream: MPI cannot wait for it."""
    made, is_done = native(case, buffers), case.backend.synchronize

    def run() -> None:
        is_done()
        made.run()

    return made._replace(run=run)


def _ops(case: Case) -> dict[str, MPI.Op]:
    return _OPS_OF_BOOL if case.dtype.kind == "b" else OPERATIONS


def _buffers(case: Case, buffers: Buffers) -> tuple[Any, Any]:
    """Send and receive buffer, MPI_IN_PLACE for one of them where MPI wants it."""
    send = described(case, buffers.x, case.in_counts)
    receive = described(case, buffers.y, case.out_counts)
    if case.collective == "exscan" and receive is None:
        return send, np.empty(send.shape, case.dtype)  # for mpi4py; MPI needs none on rank 0
    if not buffers.is_in_place or send is None or receive is None:
        return send, receive
    if case.collective == "scatter":
        return send, MPI.IN_PLACE
    return MPI.IN_PLACE, send if case.collective == "reduce_scatter" else receive


def described(case: Case, x: Array | None, counts: Sequence[int]) -> Any:
    """Return an array as mpi4py takes it.

    Itself, or its bytes where MPI does not know the dtype; bytes with counts if blocks are uneven.
    """
    if x is None or SPECS[case.collective].is_reduction:
        return x
    if case.counts is not None:
        num_bytes = [count * case.dtype.itemsize for count in counts]
        return [x.view(np.uint8), num_bytes if len(counts) > 1 else num_bytes[0], MPI.BYTE]
    return [x.view(np.uint8), MPI.BYTE] if is_bfloat16(x.dtype) else x


def _call(case: Case, send: Any, receive: Any) -> Callable[[], None]:
    world, root, op = MPI.COMM_WORLD, case.root, _ops(case).get(case.op, MPI.OP_NULL)
    calls: dict[str, Callable[[], None]] = {
        "broadcast": partial(world.Bcast, receive, root),
        "scatter": partial(world.Scatter, send, receive, root),
        "gather": partial(world.Gather, send, receive, root),
        "reduce": partial(world.Reduce, send, receive, op, root),
        "reduce_scatter": partial(world.Reduce_scatter_block, send, receive, op),
        "all_gather": partial(world.Allgather, send, receive),
        "all_reduce": partial(world.Allreduce, send, receive, op),
        "all_to_all": partial(world.Alltoall, send, receive),
        "scan": partial(world.Scan, send, receive, op),
        "exscan": partial(world.Exscan, send, receive, op),
        "barrier": world.Barrier,
    }
    uneven: dict[str, Callable[[], None]] = {
        "scatter": partial(world.Scatterv, send, receive, root),
        "gather": partial(world.Gatherv, send, receive, root),
        "reduce_scatter": partial(world.Reduce_scatter, send, receive, _numbers(case), op),
        "all_gather": partial(world.Allgatherv, send, receive),
        "all_to_all": partial(world.Alltoallv, send, receive),
    }
    return (calls if case.counts is None else uneven)[case.collective]


def _numbers(case: Case) -> list[int]:
    """Return the elements of each rank's block."""
    return [count for count in case.counts or () if isinstance(count, int)]


def through_host(case: Case, buffers: Buffers) -> Contender:
    """Return copies to page-locked memory of the host, call mpi4py, and copy back.

    The memory is kept from call to call.  On the host input and output are apart, except of a
    broadcast.
    """
    backend, (x, y, _) = case.backend, buffers
    is_broadcast = case.collective == "broadcast"
    source = None if x is None else backend.host_buffer(x)
    is_ready = is_broadcast and source is not None  # the root has the result already
    target = source if is_ready else None if y is None else backend.host_buffer(y)
    seen = [None if memory is None else memory.view(case.dtype) for memory in (source, target)]
    on_host = native(case._replace(backend=HOST), Buffers(seen[0], seen[1], is_broadcast))

    def run() -> None:
        if source is not None:
            backend.to_host([(x, source)])
            backend.synchronize()
        on_host.run()
        if target is not None and not is_ready:
            backend.to_device([(y, target)])
            backend.synchronize()

    return Contender(run, nothing, y)
