"""Programs over MPI: groups, plans, work in flight, point to point, time limits, devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator
from tests.fakes.device import on_device, on_host
from tests.fakes.driver import gpu
from tests.scenarios import on_devices as scenarios
from tests.scenarios.jobs import all_jobs
from tests.scenarios.sessions import SCENARIOS

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_programs_run_over_mpi(
    world: Communicator, scenario: Callable[[Communicator], None]
) -> None:
    scenario(world)


def test_the_world_is_the_job_and_always_the_same(
    world: Communicator, mpi_world: MPI.Intracomm
) -> None:
    assert (world.rank, world.size) == (mpi_world.rank, mpi_world.size)
    assert collectives.world() is world


def test_messages_never_meet_the_callers(world: Communicator, mpi_world: MPI.Intracomm) -> None:
    if mpi_world.size == 1:
        return
    right, left = (mpi_world.rank + 1) % mpi_world.size, (mpi_world.rank - 1) % mpi_world.size
    mine = mpi_world.isend(("mine", mpi_world.rank), right, tag=7)
    assert world.all_reduce(np.array([1]))[0] == mpi_world.size
    assert world.send_recv(np.array([mpi_world.rank]), right, left, tag=7)[0] == left
    assert mpi_world.recv(source=left, tag=7) == ("mine", left)
    mine.wait()


def test_any_intracommunicator_can_be_wrapped(mpi_world: MPI.Intracomm) -> None:
    half = mpi_world.Split(mpi_world.rank % 2, -mpi_world.rank)
    wrapped = collectives.wrap(half)
    assert (wrapped.rank, wrapped.size) == (half.rank, half.size)
    assert wrapped.all_reduce(np.array([1]))[0] == half.size
    wrapped.free()
    half.Free()


def test_only_an_intracommunicator_can_be_wrapped() -> None:
    with pytest.raises(TypeError, match="intracommunicator"):
        collectives.wrap("comm")  # type: ignore[arg-type]


def test_a_message_of_the_wrong_length_is_noticed(mpi_world: MPI.Intracomm) -> None:
    # On a communicator of its own: a mismatch makes it unusable.
    wrapped = collectives.wrap(mpi_world)
    if mpi_world.size > 1 and mpi_world.rank < 2:
        size = 3 + mpi_world.rank  # rank 0 gets more than it expects, rank 1 less
        with pytest.raises(collectives.CollectiveMismatch, match="same call with the same sizes"):
            wrapped.send_recv(np.ones(size), 1 - mpi_world.rank, 1 - mpi_world.rank)
    wrapped.free()


@pytest.mark.parametrize(("device", "every"), [("auto", 36), ("staged", 9)])
def test_device_arrays_are_served_over_mpi(
    mpi_world: MPI.Intracomm, device: Any, every: int
) -> None:
    comm = collectives.wrap(mpi_world, device=device)
    # All of them run on threads.  Other ones on each number of ranks; those that stay on the
    # device are also in `tests/devices/test_over_mpi.py`.
    for job in all_jobs(comm.size)[comm.size :: every]:
        scenarios.perform_on_device(comm, job, on_device, on_host)
    scenarios.mixed_program(comm, on_device, on_host)
    scenarios.plan_reads_afresh(comm, on_device, on_host)
    comm.free()
    gpu().check()


def test_mpi_itself_would_refuse_a_fake_device_array(mpi_world: MPI.Intracomm) -> None:
    with pytest.raises((TypeError, AttributeError, ValueError, BufferError)):
        mpi_world.Allreduce(on_device(np.ones(3)), on_device(np.ones(3)))


def test_every_rank_can_export_its_ledger(world: Communicator, mpi_tmp_path: Path) -> None:
    with world.record() as ledger:
        world.all_reduce(np.zeros(8), algorithm="ring")
    ledger.to_csv(mpi_tmp_path / f"rank{world.rank}.csv")
    world.barrier()
    num_lines = [
        sum("check" not in line for line in path.read_text().splitlines())
        for path in mpi_tmp_path.glob("rank*.csv")
    ]
    assert num_lines == [1 + 2 * (world.size - 1)] * world.size
    world.barrier()  # nobody takes the directory away while another reads


def test_inputs_shared_by_all_ranks_may_be_read_only(world: Communicator) -> None:
    x = np.ones(10)
    x.flags.writeable = False
    assert world.all_reduce(x)[0] == world.size
    assert world.all_gather(x).sum() == 10 * world.size


def test_a_communicator_with_a_call_under_way_is_not_freed(mpi_world: MPI.Intracomm) -> None:
    for progress in (None, "thread"):
        comm = collectives.wrap(mpi_world, progress=progress)
        if comm.size > 1 and comm.rank == 0:
            work = comm.recv(np.empty(2), 1, async_op=True)
            with pytest.raises(RuntimeError, match=r"recv .* is already running; wait for it"):
                comm.free()
        mpi_world.Barrier()
        if comm.size > 1 and comm.rank == 1:
            comm.send(np.ones(2), 0)
        if comm.size > 1 and comm.rank == 0:
            assert work.wait().tolist() == [1, 1]
        comm.free()
