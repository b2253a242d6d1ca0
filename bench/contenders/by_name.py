"""The contenders that are measured side by side: our plans and calls, MPI's call, and others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import collectives
from bench.contenders.contender import (
    ASYNC,
    BOUND,
    CALL,
    CHECKED,
    DROP_IN,
    DROP_IN_ASYNC,
    DROP_IN_PERSISTENT,
    FRESH,
    GLOO,
    MEMCPY,
    NATIVE,
    NATIVE_FRESH,
    PLAN,
    RIVALS,
    Contender,
    nothing,
)
from bench.contenders.limits import bound, memcpy
from bench.contenders.mpi import native
from bench.timing.fresh_arrays import Fresh
from bench.workloads.collective import Buffers, Case
from bench.workloads.expected import Array
from collectives import Communicator
from collectives.arrays.operators import operator
from collectives.communicator.planner import Planner
from collectives.schedule.contracts import SPECS
from collectives.selection import select


def contender(comm: Communicator, case: Case, buffers: Buffers, name: str) -> Contender:
    """Return the contender of this name, which may be an algorithm.  All ranks make the same."""
    if name in _OTHERS:
        return _OTHERS[name](case, buffers)
    if name in WAYS:
        return WAYS[name](comm, buffers)
    if name == BOUND:
        return bound(comm, case)
    if name == FRESH:
        return _fresh(comm.all_reduce, case, buffers)
    if name == CALL:
        # As a program makes it; like MPI's own it is told where the result goes.
        return Contender(_method(comm, case, buffers), nothing, buffers.y)
    named = {} if name == PLAN else {"algorithm": name}
    plan = _method(comm.plan, case, buffers, **named)()
    return Contender(plan.run, plan.free, buffers.y)


def algorithm_of(comm: Communicator, case: Case, name: str) -> str | None:
    """Return the algorithm behind a contender's name; None where others choose their own."""
    if name == BOUND or name in _OTHERS or name in WAYS or name in RIVALS:
        return None
    if name not in (PLAN, CALL, FRESH):
        return name
    op = operator(case.op, case.collective) if SPECS[case.collective].is_reduction else None
    backend, devices = case.backend, comm._session.devices
    chosen = select.choose(
        *(case.collective, None, case.size, case.num_bytes, op),
        topology=case.topology,
        on_device=not (backend.is_host or devices.why_staged(backend, op, case.dtype)),
    )
    return chosen.label


def _method(
    comm: Communicator | Planner, case: Case, buffers: Buffers, **more: Any
) -> Callable[[], Any]:
    """Return the collective's method with its arrays, and no argument that has its default."""
    method = getattr(comm, case.collective)
    defaults = {"op": "sum", "root": 0}
    more |= {name: value for name, value in case.settings.items() if value != defaults.get(name)}
    if case.collective == "barrier":
        return partial(method, **more)
    x, y = buffers[:2]
    if more:
        return lambda: method(x, out=y, **more)
    return lambda: method(x, out=y)  # quicker than a partial with keywords


def _fresh(call: Callable[[Array], Array], case: Case, buffers: Buffers) -> Contender:
    """Return a sum of all ranks' arrays, which makes the array for its result itself."""
    assert (case.collective, case.op) == ("all_reduce", "sum")
    assert buffers.x is not None and buffers.y is not None
    return Contender(Fresh(call, buffers.x, buffers.y), nothing, buffers.y)


def _native_fresh(case: Case, buffers: Buffers) -> Contender:
    """Return the MPI library's own, with a new array for the result of every call."""

    def call(x: Array) -> Array:
        result = np.empty_like(x)
        world.Allreduce(x, result)
        return result

    world = MPI.COMM_WORLD
    return _fresh(call, case, buffers)


def _gloo(case: Case, buffers: Buffers) -> Contender:
    """Return PyTorch's all-reduce, which works in place only.

    It gets the input itself, so that no copy counts against it; the input is overwritten before
    every sample anyhow.
    """
    from bench.contenders import process_groups  # noqa: PLC0415 - PyTorch is not installed everywhere

    assert (case.collective, case.op) == ("all_reduce", "sum") and buffers.x is not None
    process_groups.join(GLOO)
    return Contender(process_groups.all_reduce(buffers.x), process_groups.leave, buffers.x)


def _asynchronous(comm: Communicator, buffers: Buffers) -> Contender:
    call, x, y = comm.all_reduce, buffers.x, buffers.y
    return Contender(lambda: call(x, out=y, async_op=True).wait(), nothing, y)


def _checked(comm: Communicator, buffers: Buffers) -> Contender:
    checked = collectives.wrap(MPI.COMM_WORLD, check=True)
    call, x, y = checked.all_reduce, buffers.x, buffers.y
    return Contender(lambda: call(x, out=y), checked.free, y)


def _blocking_drop_in(comm: Communicator, buffers: Buffers) -> Contender:
    drop_in = collectives.Intracomm(MPI.COMM_WORLD)
    call, x, y = drop_in.Allreduce, buffers.x, buffers.y
    return Contender(lambda: call(x, y), drop_in.Free, y)


def _asynchronous_drop_in(comm: Communicator, buffers: Buffers) -> Contender:
    drop_in = collectives.Intracomm(MPI.COMM_WORLD)
    call, x, y = drop_in.Iallreduce, buffers.x, buffers.y
    return Contender(lambda: call(x, y).Wait(), drop_in.Free, y)


def _persistent_drop_in(comm: Communicator, buffers: Buffers) -> Contender:
    drop_in = collectives.Intracomm(MPI.COMM_WORLD)
    request = drop_in.Allreduce_init(buffers.x, buffers.y)

    def run() -> None:
        request.Start()
        request.Wait()

    def free() -> None:
        request.Free()
        drop_in.Free()

    return Contender(run, free, buffers.y)


WAYS: dict[str, Callable[[Communicator, Buffers], Contender]] = {
    ASYNC: _asynchronous,
    CHECKED: _checked,
    DROP_IN: _blocking_drop_in,
    DROP_IN_ASYNC: _asynchronous_drop_in,
    DROP_IN_PERSISTENT: _persistent_drop_in,
}

_OTHERS = {NATIVE: native, NATIVE_FRESH: _native_fresh, MEMCPY: memcpy, GLOO: _gloo}
