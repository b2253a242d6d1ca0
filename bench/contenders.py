"""The contenders that are measured side by side: our plans and calls, MPI's call, and others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from bench.case import (
    BOUND,
    CALL,
    FRESH,
    GLOO,
    MEMCPY,
    NATIVE,
    NATIVE_FRESH,
    PLAN,
    RIVALS,
    Buffers,
    Case,
)
from bench.fresh import Fresh
from bench.least import bound, memcpy
from bench.native import native
from bench.oracle import Array
from bench.ways import WAYS, Contender, nothing
from collectives import Communicator
from collectives.arrays.operators import operator
from collectives.communicator.planner import Planner
from collectives.schedule.contracts import SPECS
from collectives.selection import select


def contender(comm: Communicator, case: Case, buffers: Buffers, name: str) -> Contender:
    """The contender of this name: an algorithm, or a name in `case`.  All ranks make the same."""
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
    """The algorithm behind a contender's name; None where others choose their own."""
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
    """The collective's method with its arrays, and no argument that has its default."""
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


def _gloo(case: Case, buffers: Buffers) -> Contender:
    """PyTorch's all-reduce, which works in place only.

    It gets the input itself, so that no copy counts against it; the input is overwritten before
    every sample anyhow.
    """
    from bench.torch import groups  # noqa: PLC0415 - PyTorch is not installed everywhere

    assert (case.collective, case.op) == ("all_reduce", "sum") and buffers.x is not None
    groups.join(GLOO)
    return Contender(groups.all_reduce(buffers.x), groups.leave, buffers.x)


_OTHERS = {NATIVE: native, NATIVE_FRESH: _native_fresh, MEMCPY: memcpy, GLOO: _gloo}
