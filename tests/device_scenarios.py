"""The scenarios on device arrays: any kind that can be made from, and brought back to, NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.oracle import expected
from collectives import Communicator
from tests.scenarios import Job, call, same

ToDevice = Callable[[np.ndarray], Any]
ToHost = Callable[[Any], Any]


def perform_on_device(comm: Communicator, job: Job, to_device: ToDevice, to_host: ToHost) -> None:
    """As `scenarios.perform`, with every array on the device."""
    inputs = job.inputs()
    want = expected(job.collective, inputs, op=job.op, root=job.root, counts=job.counts())
    x = to_device(inputs[comm.rank])
    got = call(comm, job, x, to_host)
    assert got is None or type(got) is type(x), f"{job}: the result is a {type(got)}"
    same(to_host(got), want[comm.rank], job)


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
