"""The scenarios on device arrays: any kind that can be made from, and brought back to, NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.workloads.expected import expected
from collectives import Communicator
from tests.scenarios.jobs import Job, call, in_place, options_of, same

ToDevice = Callable[[np.ndarray], Any]
ToHost = Callable[[Any], Any]
Write = Callable[[Any, np.ndarray], None]


def perform_on_device(comm: Communicator, job: Job, to_device: ToDevice, to_host: ToHost) -> None:
    """As `scenarios.perform`, with every array on the device."""
    inputs = job.inputs()
    want = expected(job.collective, inputs, op=job.op, root=job.root, counts=job.counts())
    x = to_device(inputs[comm.rank])
    got = call(comm, job, x, to_host)
    assert got is None or type(got) is type(x), f"{job}: the result is a {type(got)}"
    same(to_host(got), want[comm.rank], job)


def perform_again(
    comm: Communicator, job: Job, to_device: ToDevice, to_host: ToHost, write: Write, num_runs: int
) -> None:
    """A plan that runs, and then calls, on the same arrays with other contents each time."""
    inputs = job.inputs()
    options = options_of(job)
    x, out = to_device(inputs[comm.rank]), None
    if job.is_in_place:
        x, out = in_place(comm, job, x)
    if job.collective == "scatter" and comm.rank != job.root:
        x = None
    plan = getattr(comm.plan, job.collective)(x, out=out, **options)
    # Where only the root knows how many elements others get, they pass no array.
    out = None if job.collective == "scatter" and job.counts() is None else plan.result
    call_again = partial(getattr(comm, job.collective), x, out=out, **options)
    for turn, run in enumerate([plan.run] * num_runs + [call_again] * num_runs, start=1):
        new = [values * turn for values in inputs]
        if x is not None:
            write(x, new[comm.rank])
        want = expected(job.collective, new, op=job.op, root=job.root, counts=job.counts())
        same(to_host(run()), want[comm.rank], f"turn {turn} of {job}")
    plan.free()


def mixed_program(comm: Communicator, to_device: ToDevice, to_host: ToHost) -> None:
    """Host and device arrays in one program, several under way at once."""
    host = np.arange(12.0) + comm.rank
    device = to_device(host)
    works = [comm.all_reduce(x, async_op=True) for x in (host, device, host, device)]
    sums = [to_host(work.wait()) for work in reversed(works)]
    want = np.arange(12.0) * comm.size + sum(range(comm.size))
    for got in sums:
        same(got, want, "mixed all_reduce")
    received = comm.broadcast(device if comm.rank == 0 else None)
    assert type(received) is type(device), "a rank without an array gets the root's kind"
    same(to_host(received), np.arange(12.0), "broadcast from the device")


def plan_reads_afresh(comm: Communicator, to_device: ToDevice, to_host: ToHost) -> None:
    """A plan on device arrays, run twice on different contents."""
    x, y = to_device(np.ones(9)), to_device(np.zeros(9))
    plan = comm.plan.all_reduce(x, out=y)
    same(to_host(plan.run()), np.full(9, float(comm.size)), "first run")
    comm.all_reduce(x, "max", out=x)
    comm.broadcast(to_device(np.full(9, 3.0)), out=x)
    same(to_host(plan.run()), np.full(9, 3.0 * comm.size), "second run")
    plan.free()
