"""The contenders that are measured side by side: our plans and calls, MPI's call, and others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from bench.case import (
    CALL,
    FRESH,
    GLOO,
    MEMCPY,
    NATIVE,
    NATIVE_FRESH,
    PLAN,
    Buffers,
    Case,
)
from bench.fresh import Fresh
from bench.oracle import Array
from bench.ways import WAYS, Contender, nothing
from collectives import Communicator
from collectives.arrays.kernels import is_bfloat16
from collectives.arrays.operators import operator
from collectives.communicator.planner import Planner
from collectives.mpi4py_compat.ops import OPERATIONS
from collectives.schedule.contracts import SPECS
from collectives.selection import select

_OPS_OF_BOOL = {"min": MPI.LAND, "max": MPI.LOR, "and": MPI.LAND, "or": MPI.LOR, "xor": MPI.LXOR}


def contender(comm: Communicator, case: Case, buffers: Buffers, name: str) -> Contender:
    """The contender of this name: an algorithm, or a name in `case`.  All ranks make the same."""
    if name in _OTHERS:
        return _OTHERS[name](case, buffers)
    if name in WAYS:
        return WAYS[name](comm, buffers)
    if name == FRESH:
        return _fresh(comm.all_reduce, case, buffers)
    if name == CALL:
        # As a program makes it; like MPI's own it is told where the result goes.
        return Contender(_method(comm, case, buffers), nothing, buffers.y)
    named = {} if name == PLAN else {"algorithm": name}
    plan = _method(comm.plan, case, buffers, **named)()
    return Contender(plan.run, plan.free, buffers.y)


def algorithm_of(case: Case, name: str) -> str | None:
    """The algorithm behind a contender's name; None where others choose their own."""
    if name in _OTHERS or name in WAYS:
        return None
    if name not in (PLAN, CALL, FRESH):
        return name
    op = operator(case.op, case.collective) if SPECS[case.collective].is_reduction else None
    chosen = select.choose(
        case.collective, None, case.size, case.num_bytes, op, topology=case.topology
    )
    return chosen.label


def _method(
    comm: Communicator | Planner, case: Case, buffers: Buffers, **more: Any
) -> Callable[[], Any]:
    """The collective's method with its arrays, and no argument that has its default."""
    method = getattr(comm, case.collective)
    defaults = {"op": "sum", "root": 0}
    more |= {name: value for name, value in case.settings.items() if value != defaults[name]}
    if case.collective == "barrier":
        return partial(method, **more)
    x, y = buffers[:2]
    if more:
        return lambda: method(x, out=y, **more)
    return lambda: method(x, out=y)  # quicker than a partial with keywords


def _fresh(call: Callable[[Array], Array], case: Case, buffers: Buffers) -> Contender:
    """A sum of all ranks' arrays, which makes the array for its result itself."""
    assert (case.collective, case.op) == ("all_reduce", "sum")
    assert buffers.x is not None and buffers.y is not None
    return Contender(Fresh(call, buffers.x, buffers.y), nothing, buffers.y)


def _native_fresh(case: Case, buffers: Buffers) -> Contender:
    """The MPI library's own, with a new array for the result of every call."""

    def call(x: Array) -> Array:
        result = np.empty_like(x)
        world.Allreduce(x, result)
        return result

    world = MPI.COMM_WORLD
    return _fresh(call, case, buffers)


def _memcpy(case: Case, buffers: Buffers) -> Contender:
    """A copy of the buffer on every rank at once: the least possible work, without a result."""
    assert buffers.x is not None and buffers.y is not None
    return Contender(partial(np.copyto, buffers.y, buffers.x), nothing, None)


def _gloo(case: Case, buffers: Buffers) -> Contender:
    """PyTorch's all-reduce, which works in place only.

    It gets the input itself, so that no copy counts against it; the input is overwritten before
    every sample anyhow.
    """
    from bench import gloo  # noqa: PLC0415 - PyTorch is not installed everywhere

    assert (case.collective, case.op) == ("all_reduce", "sum") and buffers.x is not None
    gloo.join()
    return Contender(gloo.all_reduce(buffers.x), gloo.leave, buffers.x)


def native_lacks(case: Case) -> str | None:
    """What MPI lacks for this case, as text, or None."""
    if not SPECS[case.collective].is_reduction:
        return None
    if is_bfloat16(case.dtype):
        return "bfloat16"
    return None if case.op in _ops(case) else f"op {case.op}"


def _ops(case: Case) -> dict[str, MPI.Op]:
    return _OPS_OF_BOOL if case.dtype.kind == "b" else OPERATIONS


def _native(case: Case, buffers: Buffers) -> Contender:
    """The MPI library's own call; its reduce_scatter in place leaves the result at the front."""
    result = buffers.y
    if case.collective == "reduce_scatter" and buffers.is_in_place and buffers.x is not None:
        result = buffers.x[: case.block]
    run = _native_call(case, *_native_buffers(case, buffers))
    return Contender(run, nothing, result)


def _native_buffers(case: Case, buffers: Buffers) -> tuple[Any, Any]:
    """Send and receive buffer, MPI_IN_PLACE for one of them where MPI wants it."""
    send, receive = map(_described, buffers[:2])
    if case.collective == "exscan" and receive is None:
        return send, np.empty_like(send)  # mpi4py wants one on rank 0 too; MPI leaves it as it is
    if not buffers.is_in_place or send is None or receive is None:
        return send, receive
    if case.collective == "scatter":
        return send, MPI.IN_PLACE
    return MPI.IN_PLACE, send if case.collective == "reduce_scatter" else receive


def _described(x: Array | None) -> Any:
    """An array as mpi4py takes it: itself, or its bytes where MPI does not know the dtype."""
    if x is None or not is_bfloat16(x.dtype):
        return x
    return [x.view(np.uint8), MPI.BYTE]


def _native_call(case: Case, send: Any, receive: Any) -> Callable[[], None]:
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
    return calls[case.collective]


_OTHERS = {NATIVE: _native, NATIVE_FRESH: _native_fresh, MEMCPY: _memcpy, GLOO: _gloo}
