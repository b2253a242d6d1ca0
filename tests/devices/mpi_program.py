"""Calls on devices of ranks that are processes; `test_over_mpi.py` starts it.

Its arguments name some of the functions below.  All raise an error for what is wrong.
"""

from __future__ import annotations

import logging
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator, devices
from collectives.communicator import probing
from collectives.devices import ENVELOPE, allocations, concurrency, kernel_table
from collectives.diagnostics.ledger import Row
from collectives.diagnostics.mpi_counters import MonitorUnavailable
from collectives.doctor.job import between_hosts
from tests.devices.messages.test_messages import random_messages
from tests.devices.programs import Programs
from tests.devices.staged_pairs import stage_pairs
from tests.devices.test_repeated_calls import calls_of_a_kind_under_way
from tests.diagnostics.witness_program import witnessed
from tests.fakes.device import BACKEND, FakeDeviceArray, on_device, on_host
from tests.fakes.driver import gpu
from tests.inside import forget_memory_of_driver, links_of
from tests.scenarios import on_devices as scenarios
from tests.scenarios.jobs import COLLECTIVES, Job, call, name_and_options, some_jobs

PROGRAMS = Programs()


def jobs_on(size: int) -> list[Job]:
    """Each algorithm that serves so many ranks: of the jobs on 2, 3 and 4 ranks, with all pairs."""
    some = [job for each in COLLECTIVES for job in some_jobs(each, (2, 3, 4), name_and_options)]
    return [job for job in some if job.size == size]


@PROGRAMS.on_its_own
def every_algorithm(comm: Communicator) -> None:
    for job in jobs_on(comm.size):
        scenarios.perform_on_device(comm, job, on_device, on_host)
    assert links_of(comm).staged == frozenset()
    assert BACKEND.bytes_to_host == gpu().bytes_copied["HtoD"] - 512 == 0


@contextmanager
def as_kernels(comm: Communicator) -> Iterator[None]:
    """The ranks of a job do not run at the same time here, and are made to believe that they do."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(gpu(), "has_interpreter", True)
        changed.setattr(gpu(), "seconds_between", 1e-6)
        changed.setattr(concurrency, "SECONDS", 20.0)
        changed.setattr(kernel_table, "BYTES_OF_A_BLOCK", 1 << 9)
        yield
    assert links_of(comm).why_no_kernels == ""
    assert gpu().num_calls["cuStreamBatchMemOp_v2"] <= 2  # with which the ranks agree


@PROGRAMS.on_its_own
def algorithms_as_kernels(comm: Communicator) -> None:
    with as_kernels(comm):
        for job in jobs_on(comm.size)[::3]:
            scenarios.perform_again(comm, job, on_device, on_host, write, num_runs=1)
    assert BACKEND.bytes_to_host == 0


@PROGRAMS.on_its_own
def counters_of_kernels_stay_open(comm: Communicator) -> None:
    """However many other allocations are opened after them."""
    allocations.MOST_EXPORTED, arrays = 4, list[FakeDeviceArray]()
    with as_kernels(comm):
        for turn in range(12):
            arrays.append(on_device(np.full(1 << 18, float(turn))))  # has its own allocation
            comm.all_reduce(arrays[-1], out=arrays[-1], algorithm="one_shot")
            assert on_host(arrays[-1])[-1] == comm.size * turn
    assert len(allocations.openings_of(gpu().driver)) < (comm.size - 1) * 12


@PROGRAMS.together
def calls_again_on_the_same_arrays(comm: Communicator) -> None:
    for job in jobs_on(comm.size):
        scenarios.perform_again(comm, job, on_device, on_host, write, num_runs=2)
    assert BACKEND.bytes_to_host == 0
    x, y, other = (on_device(np.ones(6)) for _ in range(3))
    plan = comm.plan.all_reduce(x, out=y, algorithm="ring")
    for turn in range(60):
        source = other if turn % 7 == comm.rank else x  # then all ranks meet again
        write(source, np.full(6, float(turn)))
        assert on_host(comm.all_reduce(source, out=y, algorithm="ring"))[0] == comm.size * turn
        write(x, np.full(6, float(turn)))
        assert on_host(plan.run())[0] == comm.size * turn
    plan.free()


@PROGRAMS.together
def one_rank_says_that_all_share_a_gpu(comm: Communicator) -> None:
    said, log = list[str](), logging.Handler()
    log.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("collectives.devices").addHandler(log)
    gpu().num_devices = 4
    comm.all_reduce(on_device(np.ones(3)))
    gpu().num_devices = 1
    assert len(said) == (comm.rank == 0), said
    assert not said or "3 ranks of this host use 1 of the 4 GPUs" in said[0]


@PROGRAMS.together
def calls_of_a_kind_under_way_at_once(comm: Communicator) -> None:
    calls_of_a_kind_under_way(comm)


def write(x: FakeDeviceArray, values: np.ndarray) -> None:
    BACKEND.copy(on_device(values), x)


@PROGRAMS.together
def mixed_calls_and_plans(comm: Communicator) -> None:
    for _ in range(3):
        scenarios.mixed_program(comm, on_device, on_host)
        scenarios.plan_reads_afresh(comm, on_device, on_host)
    for turn in range(30):  # in some calls, some ranks pass arrays of the host
        make = np.copy if (turn + comm.rank) % 7 == 0 else on_device
        y = comm.all_reduce(make(np.arange(5.0)), algorithm="ring")
        assert on_host(y).tolist() == [comm.size * k for k in range(5)]


@PROGRAMS.together
def memory_that_cannot_be_opened_is_copied(comm: Communicator) -> None:
    for name in ("ring", "one_shot"):
        x = on_device(np.arange(300.0), exportable=comm.rank % 2 == 1)
        y = on_host(comm.all_reduce(x, algorithm=name))
        assert np.array_equal(y, comm.size * np.arange(300.0))
        assert np.array_equal(on_host(x), np.arange(300.0))
        comm.all_reduce(x, out=x, algorithm=name)  # in place
        assert np.array_equal(on_host(x), comm.size * np.arange(300.0))
    plan = comm.plan.all_gather(on_device(np.ones(3) * comm.rank, exportable=False))
    for _ in range(3):
        assert on_host(plan.run()).tolist() == np.repeat(np.arange(float(comm.size)), 3).tolist()
    plan.free()
    assert BACKEND.bytes_to_host == 0


@PROGRAMS.on_its_own
def handles_are_kept_and_closed(comm: Communicator) -> None:
    allocations.MOST_EXPORTED = 4
    for turn in range(40):
        size = 1 << 19  # more than half of a part of the pool: each has its own allocation
        x = on_device(np.full(size, float(turn)))
        comm.all_reduce(x, out=x, algorithm="one_shot")
        assert on_host(x)[-1] == comm.size * turn
        del x
    assert len(links_of(comm).exports.opened) <= 4
    opened = len(allocations.openings_of(gpu().driver))
    assert 0 < opened <= (comm.size - 1) * 8, opened


@PROGRAMS.together
def memory_of_a_plan_stays_open(comm: Communicator) -> None:
    """Though no run of the plan uses it for so long that other memory would be closed later."""
    size = 1 << 17
    x = on_device(np.ones(size))
    plan = comm.plan.all_reduce(x, out=x, algorithm="one_shot")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocations, "MOST_EXPORTED", 4)
        plan.run()
        for _ in range(8):
            comm.all_reduce(on_device(np.ones(size)), algorithm="one_shot")
    comm.synchronize()
    assert on_host(plan.run())[-1] == comm.size**2
    plan.free()


@PROGRAMS.together
def communicators_come_and_go(comm: Communicator) -> None:
    for _ in range(20):
        other = comm.split(comm.rank % 2)
        assert on_host(other.all_reduce(on_device(np.ones(3))))[0] == other.size
        other.free()
    groups = [comm.split(0) for _ in range(3)]
    works = [c.all_reduce(on_device(np.ones(2)), async_op=True) for c in groups * 3]
    for work in works if comm.rank % 2 else works[::-1]:
        assert on_host(work.wait())[0] == comm.size
    for group in groups:
        group.free()


@PROGRAMS.together
def plans_in_different_orders(comm: Communicator) -> None:
    gpu().reset(seed=comm.rank, queue_length=8)  # streams are soon full
    arrays = [on_device(np.full(16, float(k))) for k in range(3)]
    plans = [comm.plan.all_reduce(x, algorithm="ring") for x in arrays]
    for turn in range(8):
        for k in range(3):
            plans[(k + comm.rank + turn) % 3].start()
        for k, plan in enumerate(plans):
            assert on_host(plan.wait())[0] == comm.size * k
    for plan in plans:
        plan.free()


@PROGRAMS.on_its_own
def a_driver_without_memory_operations_is_staged(comm: Communicator) -> None:
    if comm.rank == 1:
        fail_while(lambda: True, "cuStreamBatchMemOp_v2")
    for name in ("ring", "one_shot", "two_shot"):
        y = comm.all_reduce(on_device(np.ones(9)), algorithm=name)
        assert on_host(y).tolist() == [comm.size] * 9
    assert links_of(comm).staged == pairs_with_rank_1(comm), links_of(comm).staged
    if comm.rank == 1:
        assert all("streams cannot write values" in why for why in links_of(comm).why.values())
    else:
        assert links_of(comm).why[1] == "the stream of rank 1 cannot write values"


def pairs_with_rank_1(comm: Communicator) -> set[tuple[int, int]]:
    return {(min(1, rank), max(1, rank)) for rank in range(comm.size) if rank != 1}


def fail_while(is_failing: Callable[[], bool], name: str) -> None:
    """Let a function of the driver of this rank fail, where Python calls it."""
    driver, right = gpu().driver, type(gpu().driver).try_call

    def try_call(called: str, *arguments: Any) -> int:
        if called != name or not is_failing():
            return right(driver, called, *arguments)
        for _ in range(20):  # a GPU goes on by itself
            gpu().progress()
        return 801

    driver.try_call = try_call  # type: ignore[method-assign]


@PROGRAMS.on_its_own
def a_driver_that_fails_on_one_rank_while_links_are_agreed(comm: Communicator) -> None:
    """No rank waits for that one, or waits for what it has not written."""
    before: list[Any] = []
    for name in (
        "cuMemAlloc_v2",
        "cuStreamCreate",
        "cuEventCreate",
        "cuMemHostRegister_v2",
        "cuEventRecord",
        "cuIpcGetMemHandle",
        "cuIpcOpenMemHandle_v2",
        "cuMemcpyDtoDAsync_v2",
        "cuStreamSynchronize",
        "cuEventQuery",
    ):
        before.append(forget_memory_of_driver(gpu().driver))
        other = comm.split(0)
        if comm.rank == 1:
            fail_while(lambda other=other: getattr(links_of(other), "staged", None) is None, name)
        for algorithm in ("ring", "one_shot"):
            y = other.all_reduce(on_device(np.ones(9)), algorithm=algorithm)
            assert on_host(y).tolist() == [other.size] * 9
        plan = other.plan.all_reduce(on_device(np.ones(9)))
        for _ in range(2):
            assert on_host(plan.run()).tolist() == [other.size] * 9
        plan.free()
        if links_of(other) is None or links_of(other).staged is None:  # rank 1 has staged by itself
            assert name in ("cuEventCreate", "cuStreamCreate")
        else:
            assert links_of(other).staged == pairs_with_rank_1(comm), (name, links_of(other).why)
            assert not any("not seen" in why for why in links_of(other).why.values()), name
        other.free()
        comm.barrier()
    # A host that gives up writes 1 to a counter; the stream that writes it later finds it written.
    gpu().violations[:] = [each for each in gpu().violations if "from 1 to 1" not in each]


@PROGRAMS.on_its_own
def large_messages_between_devices_that_are_partly_staged(comm: Communicator) -> None:
    """MPI may need calls of a rank to send on what that rank's device does not wait for."""

    def is_staged(*pair: int) -> bool:
        return len({rank // 2 for rank in pair}) == 2

    stage_pairs(pytest.MonkeyPatch(), is_staged)
    advance = devices.OnDevice.advance

    def while_the_gpu_goes_on(self: devices.OnDevice, seconds: float) -> bool:
        gpu().progress()
        return advance(self, seconds)

    devices.OnDevice.advance = while_the_gpu_goes_on  # type: ignore[method-assign]
    for size in (100, 1_000_000) * 2:
        y = comm.all_reduce(on_device(np.full(size, 1.0)), algorithm="ring", timeout=60)
        assert on_host(y)[-1] == comm.size
    assert links_of(comm).staged == {
        pair for pair in combinations(range(comm.size), 2) if is_staged(*pair)
    }


@PROGRAMS.together
def progress_in_a_thread(_: Communicator) -> None:
    comm = collectives.wrap(_mpi().COMM_WORLD, progress="thread")
    works = [comm.all_reduce(on_device(np.full(4, float(k))), async_op=True) for k in range(12)]
    for k, work in enumerate(works):
        assert on_host(work.wait())[0] == comm.size * k
    comm.free()


@PROGRAMS.together
def messages_of_all_kinds(comm: Communicator) -> None:
    comm.all_reduce(on_device(np.ones(2)))
    comm.synchronize()
    x, around = on_device(np.full(50, float(comm.rank))), (comm.rank + 1) % comm.size
    before = (comm.rank - 1) % comm.size
    for _ in range(40):
        with comm.record() as ledger:
            y = comm.send_recv(x, around, before)
        assert on_host(y).tolist() == [float(before)] * 50
    links = {(row.collective, row.link, row.bytes) for row in ledger.rows()}
    assert links == {("send_recv", "peer", 400), ("envelope", "host", ENVELOPE.itemsize)}
    assert BACKEND.bytes_to_host == 0
    for seed in range(6):
        random_messages(seed, comm)
        part = comm.split(int(comm.rank == comm.size - 1))
        if part.size > 1:
            random_messages(seed, part)
        part.free()


@contextmanager
def on_hosts(*hosts: int) -> Iterator[None]:
    """Let ranks of this host be on several hosts, of which each has memory of its own."""
    from collectives.engines import mpi

    class Apart(mpi.MPI.Intracomm):
        def Split_type(self, *_: Any) -> Any:  # noqa: N802 - mpi4py's name
            return self.Split(hosts[self.rank])

    right = mpi._lowest_ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi, "_lowest_ranks", lambda comm: right(Apart(comm)))
        patch.setattr(mpi, "_hosts_of_world", [])
        patch.setattr(mpi, "_host_of_world", [])
        yield


def probe(fault: str) -> list[str]:
    """The command of a job that finds out whether MPI takes addresses of the fake GPU's memory."""
    return [sys.executable, str(Path(__file__).with_name("probe_program.py")), fault, "30"]


def rows_of(comm: Communicator, job: Job, on: Callable[[np.ndarray], Any]) -> list[Row]:
    """What a call sends."""
    with comm.record() as ledger:
        call(comm, job, on(job.inputs()[comm.rank]), on_host)
    return ledger.rows()


def sends_the_same(comm: Communicator, jobs: list[Job]) -> set[tuple[bool, str]]:
    """Let jobs send from devices what they send from hosts; return their links.

    And whether a link is one to another host.
    """
    links = set()
    for job in jobs:
        on_gpu, on_cpu = rows_of(comm, job, on_device), rows_of(comm, job, np.copy)
        same = [[row._replace(call="", link="") for row in rows] for rows in (on_gpu, on_cpu)]
        assert same[0] == same[1], job
        links |= {(row.off_host, row.link) for row in on_gpu if row.collective == job.collective}
    return links


@contextmanager
def observed(comm: Communicator) -> Iterator[None]:
    """Let MPI's counters confirm the ledger, if there are any and MPI carries all messages."""
    try:
        counters = comm.counters() if comm.topology.num_hosts == comm.size else None
    except MonitorUnavailable:
        counters = None
    with nullcontext() if counters is None else witnessed(comm, counters):
        yield
    if counters is not None:
        counters.close()


@PROGRAMS.on_its_own
def every_algorithm_between_hosts_whose_mpi_takes_device_memory(world: Communicator) -> None:
    jobs = jobs_on(world.size)
    probing.COMMAND = probe("none")
    for hosts in ((0, 0, 1), (0, 1, 2)):
        with on_hosts(*hosts):
            comm = collectives.wrap(_mpi().COMM_WORLD, device="direct", timeout=60)
        probing.COMMAND = probe("crash")  # but it is known by now
        within, between = {(False, "peer")}, {(True, "direct")}
        has_neighbour = hosts.count(hosts[comm.rank]) > 1
        assert sends_the_same(comm, jobs[::6]) == between | (within if has_neighbour else set())
        with observed(comm):
            for job in jobs[3::6]:
                scenarios.perform_on_device(comm, job, on_device, on_host)
            scenarios.mixed_program(comm, on_device, on_host)
            for size in (100, 300_000):  # which MPI sends at once, and on request
                y = comm.all_reduce(on_device(np.ones(size)), algorithm="ring")
                assert on_host(y).tolist() == [comm.size] * size
                plan = comm.plan.all_gather(on_device(np.full(size, float(comm.rank))))
                for _ in range(2):
                    assert on_host(plan.run())[::size].tolist() == [*range(comm.size)]
                plan.free()
            comm.synchronize()
        assert BACKEND.bytes_to_host == 0
        assert gpu().bytes_copied["DtoH"] == gpu().bytes_copied["HtoD"] == 512 * has_neighbour
        with on_hosts(*hosts):
            found = between_hosts(world, on_device, on_host)
        assert found.sentence.startswith("device='direct' works"), found
        comm.free()
        gpu().reset(seed=world.rank, queue_length=16)


@PROGRAMS.together
def an_mpi_that_may_not_take_device_memory_is_refused(comm: Communicator) -> None:
    """If one host of several finds that out, on all ranks."""
    probing._has_succeeded.clear()
    why = "on the host of rank 2: what it saw)" if comm.size > 2 else ""
    code = f"print('WRONG  what it saw'); exit({comm.rank // 2})"
    with pytest.MonkeyPatch.context() as patch, on_hosts(0, 0, 1):
        patch.setattr(probing, "COMMAND", [sys.executable, "-c", code])
        for _ in range(2):
            with pytest.raises(collectives.CollectiveError) as caught:
                collectives.wrap(_mpi().COMM_WORLD, device="direct", timeout=60)
            assert why in str(caught.value)


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI


@PROGRAMS.together
def checked_mode(_: Communicator) -> None:
    comm = collectives.wrap(_mpi().COMM_WORLD, check=True)
    x = on_device(np.ones(4))
    assert on_host(comm.all_reduce(x))[0] == comm.size
    with pytest.raises(collectives.CollectiveMismatch, match="all_gather"):
        comm.all_gather(x) if comm.rank == 0 else comm.all_reduce(x)
    assert on_host(comm.all_reduce(x))[0] == comm.size
    comm.free()


@PROGRAMS.together
def finite_mode(world: Communicator) -> None:
    """Asynchronous calls of two communicators, which are compared by messages, in any order."""
    comm = collectives.wrap(_mpi().COMM_WORLD, check="finite")
    other, rng = comm.split(0), random.Random(comm.rank)
    x = on_device(np.ones(4))
    for turn in range(8):
        order = (comm, other) if (comm.rank + turn) % 2 else (other, comm)
        works = [each.all_reduce(x, algorithm="ring", async_op=True) for each in order]
        for name in ("one_shot", "ring", "two_shot", "linear"):
            works.append(comm.all_reduce(x, algorithm=name, async_op=True))
            time.sleep(rng.choice((0.0, 0.002)))
        for work in works:
            assert on_host(work.wait(timeout=20)).tolist() == [comm.size] * 4
    other.free()
    comm.free()


def two_checked_communicators() -> tuple[Communicator, Communicator]:
    devices.standstill.THREADS.add("fake GPU")  # which makes no calls
    comm = collectives.wrap(_mpi().COMM_WORLD, check=True, timeout=20)
    return comm, comm.split(0)


def in_different_orders(world: Communicator, *, are_linked: bool) -> list[str]:
    """Let ranks make blocking calls of two communicators; return the errors of all of them."""
    comms = two_checked_communicators()
    if are_linked:
        for comm in comms:
            comm.all_reduce(on_device(np.ones(4)))
            comm.synchronize()
    error = ""
    try:
        for comm in comms[::-1] if world.rank == 0 else comms:
            comm.all_reduce(on_device(np.ones(4)))
    except collectives.CollectiveError as caught:
        error = f"{type(caught).__name__}: {caught}"
    rows = np.zeros((1, 500), np.uint8)
    rows[0, : len(error)] = [*error.encode()]
    return [bytes(row).rstrip(b"\0").decode() for row in world.all_gather(rows)]


@PROGRAMS.on_its_own
def blocking_calls_of_two_communicators_in_different_orders(world: Communicator) -> None:
    for are_linked in (False, True):
        errors = in_different_orders(world, are_linked=are_linked)
        assert all(errors), errors
        assert sum(error.startswith("CollectiveMismatch") for error in errors) >= 2
        wait = r"rank \d waits for rank \d(?:, \d)* in call \d of ranks 0 to 2(?: #\d)?: all_reduce"
        for error in errors:
            assert "ranks wait for each other in blocking calls" in error, errors
            assert len(re.findall(wait, error)) >= 2, errors


@PROGRAMS.together
def calls_of_two_communicators_in_different_orders_that_end(world: Communicator) -> None:
    """The control: a rank is late, has an asynchronous call, or a thread that makes the other.

    Or it makes the other call when its time limit has passed.
    """

    def late(comm: Communicator) -> None:
        time.sleep(0.3 * world.rank)
        comm.all_reduce(on_device(np.ones(4)))

    comms = two_checked_communicators()
    for comm in comms:
        late(comm)
    order = comms[::-1] if world.rank == 0 else comms
    works = [comm.all_reduce(on_device(np.ones(4)), async_op=True) for comm in order]
    for work in works:
        work.wait()
    if world.rank == 0:
        thread = threading.Thread(target=lambda: (time.sleep(0.6), late(comms[1])))
        thread.start()
        late(comms[0])
        thread.join()
    else:
        for comm in comms[::-1]:
            comm.all_reduce(on_device(np.ones(4)))
    if world.rank == 0:
        with pytest.raises(collectives.CollectiveTimeout) as caught:
            comms[0].all_reduce(on_device(np.ones(4)), timeout=0.5)
        late(comms[1])
        assert on_host(caught.value.work.wait()).tolist() == [world.size] * 4
    else:
        for comm in comms[::-1]:
            comm.all_reduce(on_device(np.ones(4)))
    plan = comms[0].plan.all_reduce(on_device(np.ones(4)))
    for turn in range(6):  # the ranks are late in turn
        time.sleep(0.2 * (turn % world.size == world.rank))
        plan.run()
    plan.free()
    for comm in comms:
        comm.synchronize()
        comm.free()


if __name__ == "__main__":
    PROGRAMS.run(sys.argv[1:], queue_length=16)
