"""Calls on devices of ranks that are threads: on the fake GPU, in orders drawn by a seed."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import CollectiveMismatch, Communicator, Operator, algorithms
from collectives.arrays import operator
from collectives.devices.driver import WAIT_VALUE
from collectives.devices.links import Links, Proposal
from collectives.devices.meeting import Meeting, Wait, Waits
from collectives.devices.streams import STREAMS, Stream, Streams
from collectives.engines import deadline_in, poll_until
from collectives.engines.board import Board
from collectives.engines.host_memory import NUM_AREAS
from collectives.schedule import Topology
from collectives.selection.select import choose
from tests.fakes.device import BACKEND, FakeBackend, FakeDeviceArray, FakeStream, on_device, on_host
from tests.fakes.driver import gpu
from tests.inside import (
    board_of,
    execution_of,
    forget_kept_calls,
    has_free_slots_only,
    links_of,
    loop_of,
    transport_of,
    waits_for_device,
)
from tests.scenarios import on_devices as scenarios
from tests.scenarios.jobs import COLLECTIVES, OPS, Job, all_jobs, some_jobs
from tests.scenarios.operators import ordered_jobs, perform_in_order

ON_GPU = sorted({d for dtypes in OPS.values() for d in dtypes} - {"longdouble", "clongdouble"})

pytestmark = pytest.mark.usefixtures("new_gpu")


def run(body: Callable[[Communicator], Any], size: int, **options: Any) -> list[Any]:
    return collectives.run(body, size, timeout=100, **options)


def is_staged() -> bool:
    """Whether the data of some message has been in host memory."""
    return BACKEND.bytes_to_host > 0


# All algorithms

QUEUE_LENGTHS = {1: 64, 2: 8, 3: 64, 4: 16, 5: 64}  # by the number of ranks


@cache
def jobs_of(collective: str) -> list[Job]:
    """Each algorithm, as it stands and with options, on each number of ranks and of each kind."""
    return some_jobs(collective, QUEUE_LENGTHS, lambda job: [job.algorithm])


@pytest.mark.parametrize("size", QUEUE_LENGTHS)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.slow
def test_every_algorithm_gives_the_serial_result_on_devices(collective: str, size: int) -> None:
    gpu().reset(seed=size, queue_length=QUEUE_LENGTHS[size])
    jobs = [job for job in jobs_of(collective) if job.size == size]
    all_of_them = [job for job in all_jobs(size) if job.collective == collective]
    assert {job.algorithm for job in jobs} == {job.algorithm for job in all_of_them}

    def every(comm: Communicator) -> None:
        for job in jobs:
            scenarios.perform_on_device(comm, job, on_device, on_host)

    run(every, size)
    assert not is_staged() or size == 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_results_do_not_depend_on_the_order_in_which_devices_execute(seed: int) -> None:
    gpu().reset(seed, queue_length=8 + seed)

    def every(comm: Communicator) -> None:
        for job in all_jobs(comm.size)[seed::40]:
            scenarios.perform_on_device(comm, job, on_device, on_host)

    run(every, 3 + seed % 3)
    assert not is_staged()


@pytest.mark.parametrize("dtype", ON_GPU)
@pytest.mark.slow
def test_every_dtype_is_combined_on_devices(dtype: str) -> None:
    ops = [op for op, dtypes in OPS.items() if dtype in dtypes]

    def every(comm: Communicator) -> None:
        for op in ops:
            job = Job("all_reduce", "one_shot", comm.size, 101, dtype, op)
            scenarios.perform_on_device(comm, job, on_device, on_host)

    run(every, 3)
    assert not is_staged()


@pytest.mark.parametrize("scenario", [scenarios.mixed_program, scenarios.plan_reads_afresh])
def test_programs_on_devices_do_what_they_do_on_the_host(scenario: Any) -> None:
    run(lambda comm: scenario(comm, on_device, on_host), 3)


@pytest.mark.slow
def test_results_have_the_bits_of_the_host() -> None:
    """Also of float16, for which each combination is rounded."""

    def body(comm: Communicator) -> None:
        rng = np.random.default_rng(comm.rank)
        for dtype in (np.float16, np.float32, np.complex64):
            x = rng.standard_normal(301).astype(dtype)
            for name in algorithms.names("all_reduce"):
                if algorithms.info("all_reduce", name).serves(comm.size):
                    want = comm.all_reduce(x, algorithm=name)
                    found = on_host(comm.all_reduce(on_device(x), algorithm=name))
                    assert found.tobytes() == want.tobytes(), (name, dtype)

    run(body, 4)
    assert not is_staged()


# What is recorded, and what is moved


def test_the_ledger_is_that_of_the_host() -> None:
    def rows(comm: Communicator, make: Any) -> list[Any]:
        with comm.record() as ledger:
            comm.all_reduce(make(np.ones(60)), algorithm="ring")
            comm.all_gather(make(np.ones(7)), algorithm="bruck")
        return [(row.algorithm, row.round, row.dst, row.bytes) for row in ledger.rows()]

    on_gpu = run(lambda comm: rows(comm, on_device), 4)
    assert on_gpu == run(lambda comm: rows(comm, np.copy), 4)
    assert not is_staged()


def test_only_the_data_of_messages_is_read_from_peers() -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce(on_device(np.zeros(1)), algorithm="ring")  # agrees on links
        comm.barrier()
        gpu().bytes_copied["DtoD"] = 0
        comm.barrier()
        comm.all_gather(on_device(np.zeros(10)), algorithm="ring")

    run(body, 3)
    # Each rank copies its own block, and 2 of others.
    assert gpu().bytes_copied["DtoD"] == 3 * 3 * 80


def test_ranks_that_read_each_other_do_not_cut_reductions_into_lanes() -> None:
    x = np.arange(1 << 20, dtype=np.float32)

    def body(comm: Communicator) -> None:
        op = operator("sum", "all_reduce")
        assert choose("all_reduce", "ring", comm.size, x.nbytes, op, itemsize=4).segments > 1
        y = on_host(comm.all_reduce(on_device(x), algorithm="ring"))
        assert np.array_equal(y, 3 * x)

    run(body, 3)
    assert gpu().num_calls["cuLaunchKernel"] == 3 * 2


# Who is staged, and why


def test_ranks_may_use_one_stream() -> None:
    stream = FakeStream("of all")

    def body(comm: Communicator) -> Any:
        with BACKEND.on_stream(stream):
            return on_host(comm.all_reduce(on_device(np.arange(5.0)), algorithm="ring")).tolist()

    assert run(body, 3) == [[0, 3, 6, 9, 12]] * 3
    assert not is_staged()


def test_a_call_begins_after_what_is_on_the_callers_stream() -> None:
    def body(comm: Communicator) -> None:
        with BACKEND.on_stream(FakeStream("the caller's")):
            for turn in range(10):
                x = on_device(np.zeros(100))
                for k in range(5):  # still to be done when the call is made
                    x.fill(k + turn)
                work = comm.all_reduce(x, async_op=True)
                y = on_host(work.wait())
                assert y.tolist() == [(4 + turn) * comm.size] * 100

    run(body, 3)
    assert not is_staged()


@pytest.fixture
def word() -> Iterator[np.ndarray]:
    """Host memory for which a stream can wait."""
    word = np.zeros(1, np.uint32)
    gpu().driver.call("cuMemHostRegister_v2", word.ctypes.data, word.nbytes, 3)
    yield word
    word[:] = 1
    gpu().synchronize()
    gpu().driver.call("cuMemHostUnregister", word.ctypes.data)


def wait_for_1(stream: FakeStream, word: np.ndarray) -> None:
    operation = np.array([WAIT_VALUE, word.ctypes.data, 1, 0, 0, 0], np.int64)
    gpu().driver.call("cuStreamBatchMemOp_v2", stream.ptr, 1, operation.ctypes.data, 0)


def test_a_call_does_not_begin_after_what_is_put_on_the_callers_stream_later(
    word: np.ndarray,
) -> None:
    """Even if another rank comes to the call later still."""

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.ones(6))
        plan = comm.plan.all_reduce(x, out=y)
        for call in (partial(comm.all_reduce, x, async_op=True), plan.start) * 2:
            comm.barrier()
            if comm.rank == 1:
                comm.recv(np.empty(1), 0)
            work = call() or plan
            if comm.rank == 0:
                wait_for_1(BACKEND.current_stream(), word)
                comm.send(np.ones(1), 1)
            assert work.wait(timeout=20) is not None
            comm.barrier()
            word[:] = 1
            BACKEND.current_stream().synchronize()
            comm.barrier()
            word[:] = 0

    run(body, 2)
    assert not is_staged()


def test_a_call_does_not_end_while_another_rank_looks_at_it() -> None:
    """Compiled code looks at words that the end of the call clears."""
    is_ended, is_looked_at, words = threading.Event(), threading.Event(), list[int]()

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(6))
        for _ in range(2):
            comm.all_reduce(x, algorithm="ring", async_op=True).wait()
        assert comm.rank == 0 or is_ended.wait(20)
        work: Any = comm.all_reduce(x, algorithm="ring", async_op=True)
        if comm.rank == 1:
            work.give_up(RuntimeError("the other one has ended"))
            return
        execution: Any = execution_of(work)
        loop, right = loop_of(execution), loop_of(execution).can_advance

        def look() -> bool:
            if threading.current_thread().name.startswith("looks"):
                is_looked_at.set()
                is_ended.wait(0.2)  # the end waits for this thread
                words.append(int(loop.words[loop.names.MINE]))
            return bool(right())

        loop.can_advance = look
        assert loop.is_coming
        with ThreadPoolExecutor(1, "looks") as thread:
            while not is_looked_at.is_set():  # the watch may advance the call just now
                can_move = thread.submit(lambda: execution.can_move)
                is_looked_at.wait(0.01)
            work.give_up(RuntimeError("it ends"))
            is_ended.set()
            assert not can_move.result()
        assert words
        assert all(words)

    run(body, 2)


def test_what_a_call_has_put_on_its_stream_is_waited_for_though_another_thread_ends_the_call(
    word: np.ndarray,
) -> None:
    """No context is current in that thread."""
    gpu().driver.most_outstanding = 2  # so that the call cannot be enqueued as a whole
    is_at_work = threading.Event()

    def body(comm: Communicator) -> None:
        x, others = on_device(np.ones(6)), comm.split(0)
        comm.all_reduce(x, algorithm="ring")
        comm.synchronize()
        comm.barrier()
        if comm.rank == 0:
            wait_for_1(BACKEND.current_stream(), word)
        work = comm.all_reduce(x, algorithm="ring", async_op=True)
        while not is_at_work.is_set():
            work.test()
            if comm.rank == 0 and waits_for_device(execution_of(work)):
                is_at_work.set()
        others.barrier()  # no rank tests its call after another's has expired
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work.expire, 0.0).result()
        others.barrier()
        assert not STREAMS.may_block(gpu().driver)
        others.barrier()
        word[:] = 1
        assert poll_until(lambda: STREAMS.may_block(gpu().driver), deadline_in(20))
        transport_of(comm).failed.clear()  # which nothing uses any more

    run(body, 3)


def test_a_rank_that_abandons_the_agreement_on_links_stages_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other rank has agreed, and proposes nothing any more."""
    right = Proposal.look

    def look(self: Proposal, meeting: Meeting) -> Waits:
        yield from right(self, meeting)
        yield Wait(lambda: self._rank != 0, list)

    monkeypatch.setattr(Proposal, "look", look)

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(4))
        work = comm.all_reduce(x, async_op=True)
        while comm.rank and links_of(comm).staged is None:
            work.test()
        received = comm.recv(np.empty(1), 1 - comm.rank, async_op=True)
        sent = comm.send(np.ones(1), 1 - comm.rank, async_op=True)
        while not (received.test() and sent.test()):
            work.test()
        work.expire(0.0)
        for _ in range(3):
            assert on_host(comm.all_reduce(x, timeout=20)).tolist() == [2.0] * 4
        assert comm.rank or "was abandoned" in links_of(comm).why_lost

    run(body, 2)


@pytest.mark.parametrize("is_plan", [False, True])
def test_a_call_in_a_new_thread_begins_after_what_is_on_its_stream(
    is_plan: bool, word: np.ndarray
) -> None:
    """No context is current there before the call."""

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.ones(6))
        plan = comm.plan.all_reduce(x, out=y)
        call = plan.run if is_plan else partial(comm.all_reduce, x, out=y)
        for _ in range(3):
            call()

        def write_and_call() -> list[float]:
            BACKEND.copy(on_device(np.full(6, 5.0)), x)
            return on_host(call()).tolist()  # type: ignore[union-attr]

        with ThreadPoolExecutor(1) as pool:
            wait_for_1(pool.submit(BACKEND.current_stream).result(), word)
            result = pool.submit(write_and_call)
            time.sleep(0.2)
            word[:] = 1
            assert result.result() == [10.0] * 6

    run(body, 2)
    assert not is_staged()


@pytest.mark.parametrize("on_host_here", [{0}, {1, 2}, {3}])
def test_a_call_in_which_some_arrays_are_on_the_host_is_staged(on_host_here: set[int]) -> None:
    def body(comm: Communicator) -> None:
        make = np.copy if comm.rank in on_host_here else on_device
        for name in ("ring", "one_shot"):
            y = comm.all_reduce(make(np.arange(6.0) + comm.rank), algorithm=name)
            assert on_host(y).tolist() == [6, 10, 14, 18, 22, 26]
            y = comm.all_reduce(on_device(np.ones(3)), algorithm=name)  # and on devices again
            assert on_host(y).tolist() == [4, 4, 4]

    run(body, 4)
    assert is_staged()


def test_calls_with_host_and_device_arrays_follow_each_other_in_any_order() -> None:
    def body(comm: Communicator) -> None:
        rng = np.random.default_rng(5)
        for _ in range(60):
            mixed = (np.copy, on_device)[(comm.rank + rng.integers(2)) % 2]
            make = (np.copy, on_device, mixed)[rng.integers(3)]
            name = rng.choice(["ring", "one_shot", "recursive_doubling"])
            y = comm.all_reduce(make(np.arange(4.0) + comm.rank), algorithm=str(name))
            assert on_host(y).tolist() == [3, 6, 9, 12]

    run(body, 3)


@pytest.mark.parametrize("streams", ["capturing", "waiting_for_captured"])
def test_a_stream_that_is_captured_is_refused_by_all(streams: str) -> None:
    """Also the legacy stream, beside another one that is captured."""

    def body(comm: Communicator) -> str:
        x, stream = on_device(np.ones(3)), BACKEND.current_stream().ptr
        if comm.rank == 1:
            getattr(gpu(), streams).add(stream)
        with pytest.raises(collectives.CollectiveError) as caught:
            comm.all_reduce(x)
        getattr(gpu(), streams).discard(stream)
        assert on_host(comm.all_reduce(x)).tolist() == [3, 3, 3]  # all goes on
        return str(caught.value)

    found = run(body, 3)
    assert found[0] == found[1] == found[2]
    assert "rank 1: the stream is being captured" in found[0]
    assert not is_staged()


def test_a_thread_that_captures_a_stream_ends_no_call() -> None:
    """Meanwhile the driver tells nobody whether events are complete."""

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(3)), on_device(np.ones(3))
        plan = comm.plan.all_reduce(x, out=y)
        for call in (plan.run, partial(comm.all_reduce, x, out=y)):
            for _ in range(6):
                gpu().num_queries_refused = 20
                assert on_host(call()).tolist() == [3, 3, 3]
        gpu().num_queries_refused = 0
        plan.free()

    gpu().reset(queue_length=10)  # queues are soon full, so that events are asked for
    run(body, 3)


def test_an_array_between_two_elements_is_staged_by_all() -> None:
    def body(comm: Communicator) -> None:
        x = on_device(np.zeros(33, np.uint8))
        shift = comm.rank == 1
        x = FakeDeviceArray(x.memory[shift : shift + 32].view(np.float64))
        x.fill(2.0)
        assert on_host(comm.all_reduce(x)).tolist() == [6] * 4

    run(body, 3)
    assert is_staged()


def test_an_operator_in_python_is_staged() -> None:
    run(lambda comm: [perform_in_order(comm, j, on_device, on_host) for j in ordered_jobs(3)], 3)
    assert is_staged()


def test_a_dtype_without_a_kernel_is_staged() -> None:
    x = np.ones(3, np.longdouble)
    (y, *_) = run(lambda comm: on_host(comm.all_reduce(on_device(x))), 3)
    assert y.tolist() == [3, 3, 3]
    assert is_staged()


@pytest.mark.parametrize(
    ("hosts", "start"), [((0, 0, 1, 1), 0), ((0, 1, 1, 1), 5), ((0, 1, 0, 1), 10)]
)
@pytest.mark.slow
def test_ranks_of_other_hosts_are_staged(
    hosts: tuple[int, ...], start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks see only what those of their own host show, and compile only their programs.

    Every fifth call of all is made with one of these hosts.
    """
    right = Board.__init__

    def of_host(
        self: Board, memory: Any, parts: Any, rank: int, identity: Any, why_none: str = ""
    ) -> None:
        mine = [part if hosts[part] == hosts[parts[rank]] else None for part in parts]
        right(self, memory, mine, rank, identity, why_none)

    monkeypatch.setattr(Board, "__init__", of_host)

    def body(comm: Communicator) -> str:
        for job in all_jobs(comm.size)[start::15]:
            scenarios.perform_on_device(comm, job, on_device, on_host)
        return comm.explain("all_reduce", on_device(np.ones(3))).links

    found = run(body, 4, topology=Topology(hosts))
    why = {
        (0, 0, 1, 1): "rank 2 is staged: it is on another host",
        (0, 1, 1, 1): "all staged in host memory: no other rank is on this host",
        (0, 1, 0, 1): "rank 1 is staged: it is on another host",
    }
    assert why[hosts] in found[0]
    assert gpu().bytes_copied["DtoH"] > 0 and gpu().num_calls["cuStreamWaitEvent"] > 100


def test_calls_are_staged_if_device_is_staged() -> None:
    run(lambda comm: comm.all_reduce(on_device(np.ones(3))), 3, device="staged")
    assert is_staged()
    with pytest.raises(ValueError, match="'peer' or 'direct' or 'staged', not 'cuda'"):
        run(lambda comm: None, 3, device="cuda")
    with pytest.raises(ValueError, match="device='direct' needs MPI"):
        run(lambda comm: None, 3, device="direct")


# Links


@pytest.mark.parametrize("check", [False, True])
def test_peer_refuses_what_would_be_staged(check: bool) -> None:
    add = Operator.from_function(lambda x, y: x + y, commutative=True)

    def body(comm: Communicator) -> list[str]:
        x, sentences = on_device(np.ones(4)), []
        memory = on_device(np.zeros(40, np.uint8)).memory[comm.rank == 2 :]
        odd = FakeDeviceArray(memory[:32].view(np.float64))
        for call in (lambda: comm.all_reduce(x, op=add), lambda: comm.all_reduce(odd)):
            with pytest.raises(collectives.CollectiveError) as caught:
                call()
            sentences.append(str(caught.value))
            assert on_host(comm.all_reduce(x)).tolist() == [3.0] * 4  # all goes on
        return sentences

    found = run(body, 3, device="peer", check=check)
    assert found[0] == found[1] == found[2]
    assert "device='peer' was asked for" in found[0][0]
    assert "its operator is a function in Python" in found[0][0]
    assert "rank 2: an array begins between two elements" in found[0][1]
    assert not is_staged()


@pytest.mark.parametrize("check", [False, True])
def test_peer_refuses_for_what_only_some_ranks_know(check: bool) -> None:
    """Nobody waits for a rank that refuses."""

    def body(comm: Communicator) -> str:
        pairs = [comm.subgroup([1, 2]) for _ in range(NUM_AREAS)] if comm.rank else []
        for pair in pairs:
            assert on_host(pair.all_reduce(on_device(np.ones(4)))).tolist() == [2.0] * 4
        comm.barrier()
        with pytest.raises(collectives.CollectiveError) as caught:
            comm.all_reduce(on_device(np.ones(4)))
        return str(caught.value)

    found = run(body, 3, device="peer", check=check)
    assert re.search("rank [12] makes the call on arrays of the host", found[0])
    assert "too many communicators of this rank use a device" in found[1]
    assert "too many communicators of this rank use a device" in found[2]
    assert not is_staged()


def test_peer_refuses_links_that_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Proposal.why_unreadable

    def unreadable(self: Proposal, rank: int) -> str:
        return "no way" if {rank, self._rank} == {0, 2} else right(self, rank)

    monkeypatch.setattr(Proposal, "why_unreadable", unreadable)

    def body(comm: Communicator) -> str:
        with pytest.raises(collectives.CollectiveError) as caught:
            comm.all_reduce(on_device(np.ones(4)))
        return str(caught.value)

    found = run(body, 3, device="peer")
    assert "rank 2 is staged: no way" in found[0]
    assert "another pair of ranks is staged" in found[1]
    assert "rank 0 is staged: no way" in found[2]
    assert not is_staged()


def test_threads_on_different_gpus_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of one GPU's driver do not order the streams of another."""
    right = Links.__init__

    def on_another(self: Links, board: Board, *arguments: Any) -> None:
        right(self, board, *arguments)
        self.uuid = bytes([board.rank // 2]) * 16

    monkeypatch.setattr(Links, "__init__", on_another)

    def body(comm: Communicator) -> str:
        x = on_device(np.ones(4))
        for name in ("ring", "one_shot"):
            assert on_host(comm.all_reduce(x, algorithm=name)).tolist() == [4.0] * 4
        assert links_of(comm).staged == {(0, 2), (0, 3), (1, 2), (1, 3)}
        return comm.explain("all_reduce", x).links

    assert "rank 3 is staged: rank 3 is a thread of this process on another GPU" in run(body, 4)[0]


def test_links_are_agreed_once() -> None:
    def body(comm: Communicator) -> Any:
        before = gpu().num_calls["cuMemAlloc_v2"]
        for _ in range(3):
            comm.all_reduce(on_device(np.ones(3)))
        return links_of(comm).staged, gpu().num_calls["cuMemAlloc_v2"] - before

    found = run(body, 3)
    assert [staged for staged, _ in found] == [frozenset()] * 3
    assert gpu().num_calls["cuMemAlloc_v2"] <= 1  # for the pattern of this process


def test_the_links_are_explained() -> None:
    def body(comm: Communicator) -> list[str]:
        x = on_device(np.ones(3))
        texts = [comm.explain("all_reduce", np.ones(3)).links, comm.explain("all_reduce", x).links]
        comm.all_reduce(x)
        return [*texts, comm.explain("all_reduce", x).links]

    before = "not known before the first call on devices"
    assert run(body, 3)[1] == ["", before, "memory of rank 0, 2 is read directly"]
    explain = lambda comm: str(comm.explain("all_reduce", on_device(np.ones(3))))  # noqa: E731
    found, _ = run(explain, 2, device="staged")
    assert "links: all staged in host memory: device='staged' was asked for" in found


def test_memory_that_is_read_with_wrong_contents_is_noticed(monkeypatch: Any) -> None:
    from collectives.devices import links as module

    wrong_between = {(0, 2)}

    def why(self: Any, rank: int) -> str:
        found = original(self, rank)
        pair = min(rank, self._rank), max(rank, self._rank)
        return "read with wrong contents" if pair in wrong_between and self._rank == 0 else found

    original = module.Proposal.why_unreadable
    monkeypatch.setattr(module.Proposal, "why_unreadable", why)

    def body(comm: Communicator) -> Any:
        for name in ("ring", "one_shot", "two_shot"):
            y = on_host(comm.all_reduce(on_device(np.arange(6.0)), algorithm=name))
            assert y.tolist() == [0, 3, 6, 9, 12, 15]
        return links_of(comm).staged, links_of(comm).why

    found = run(body, 3)
    assert [staged for staged, _ in found] == [{(0, 2)}] * 3
    assert found[0][1] == {1: "", 2: "read with wrong contents"}
    assert found[2][1] == {0: "rank 0 cannot read the memory of rank 2", 1: ""}
    assert gpu().bytes_copied["DtoH"] > 0


def test_another_device_of_a_rank_is_staged() -> None:
    class Other(FakeBackend):
        name = "fake:1"

    other = Other()

    def body(comm: Communicator) -> None:
        from collectives.arrays import backends

        comm.all_reduce(on_device(np.ones(3)))
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 1:
                patch.setattr(backends, "backend_of", lambda *_: other)
        assert on_host(comm.all_reduce(on_device(np.ones(3))))[0] == 3

    run(body, 3)


# Several calls at once


def test_more_calls_may_be_under_way_than_there_are_slots() -> None:
    def body(comm: Communicator) -> None:
        arrays = [on_device(np.full(5, comm.rank + float(k))) for k in range(60)]
        works = [comm.all_reduce(x, async_op=True) for x in arrays]
        for k, work in reversed([*enumerate(works)]):
            assert on_host(work.wait())[0] == 3 * k + 3

    run(body, 3)


def test_ranks_may_wait_for_calls_in_different_orders() -> None:
    def body(comm: Communicator) -> None:
        other = comm.split(0)
        works = [c.all_reduce(on_device(np.ones(4)), async_op=True) for c in (comm, other) * 3]
        order = works if comm.rank % 2 else works[::-1]
        assert all(on_host(work.wait())[0] == comm.size for work in order)
        other.free()

    run(body, 4)


@pytest.mark.slow
def test_all_slots_are_given_back() -> None:
    """Also those of proposals of links that turn out to be needless."""

    def body(comm: Communicator) -> None:
        for turn in range(20):
            other = comm.split(0)
            arrays = [
                np.ones(3) if turn % 4 == k == comm.rank else on_device(np.ones(3))
                for k in range(5)
            ]
            works = [other.all_reduce(x, async_op=True) for x in arrays]
            for number in random.Random(f"{turn} {comm.rank}").sample(range(5), 5):
                works[number].wait()
            comm.barrier()
            forget_kept_calls(other)
            comm.barrier()
            board = board_of(other)
            assert board.has_room and has_free_slots_only(board)
            comm.barrier()
            other.free()

    run(body, 3)


@pytest.mark.slow
def test_ranks_may_run_plans_in_different_orders() -> None:
    def body(comm: Communicator) -> None:
        arrays = [on_device(np.full(6, float(k))) for k in range(32)]
        plans = [comm.plan.all_reduce(x) for x in arrays]
        for _ in range(3):
            order = plans if comm.rank % 2 else plans[::-1]
            for plan in order:
                plan.start()
            for k, plan in enumerate(plans):
                assert on_host(plan.wait())[0] == 3.0 * k
        for plan in plans:
            plan.free()

    run(body, 3)
    assert not is_staged()


def test_a_queue_that_is_full_blocks_no_other_call() -> None:
    """Each rank has another plan under way whose stream is full."""
    gpu().reset(queue_length=8)

    def body(comm: Communicator) -> None:
        arrays = [on_device(np.full(16, float(k))) for k in range(3)]
        plans = [comm.plan.all_reduce(x, algorithm="ring") for x in arrays]
        for turn in range(4):
            for k in range(3):
                plans[(k + comm.rank + turn) % 3].start()
            for k, plan in enumerate(plans):
                assert on_host(plan.wait())[0] == 3.0 * k
        for plan in plans:
            plan.free()

    run(body, 3)


def test_there_may_be_more_plans_than_there_is_room_for() -> None:
    def body(comm: Communicator) -> None:
        plans = [comm.plan.all_reduce(on_device(np.full(2, float(k)))) for k in range(70)]
        for k, plan in enumerate(plans):
            assert on_host(plan.run())[0] == 2.0 * k
        for plan in plans:
            plan.free()
        plan = comm.plan.all_reduce(on_device(np.ones(2)))
        assert on_host(plan.run())[0] == 2
        plan.free()

    run(body, 2)


def test_a_plan_of_which_one_rank_has_a_host_array_is_staged() -> None:
    def body(comm: Communicator) -> None:
        make = np.copy if comm.rank == 1 else on_device
        plan = comm.plan.all_reduce(make(np.ones(3)))
        for _ in range(12):
            assert on_host(plan.run()).tolist() == [3, 3, 3]
            assert on_host(comm.all_reduce(on_device(np.ones(2))))[0] == 3
        plan.free()

    run(body, 3)


def test_freed_communicators_make_room_for_others() -> None:
    def body(comm: Communicator) -> None:
        for _ in range(12):  # more than a rank has areas for
            other = comm.split(0)
            assert on_host(other.all_reduce(on_device(np.ones(3))))[0] == comm.size
            other.free()

    run(body, 3)
    assert not is_staged()


def test_communicators_for_which_there_is_no_room_are_staged() -> None:
    def body(comm: Communicator) -> None:
        others = [comm.split(0) for _ in range(12)]
        for other in (*others, *others):
            assert on_host(other.all_reduce(on_device(np.ones(3))))[0] == comm.size
        for other in others:
            other.free()

    run(body, 3)
    assert is_staged()


def test_calls_may_begin_in_another_order_than_that_of_their_numbers() -> None:
    """A call with a header begins later than the call on host arrays that follows it."""

    def body(comm: Communicator) -> None:
        for turn in range(8):
            x = on_device(np.full(4, float(turn))) if comm.rank == 0 else None
            first = comm.broadcast(x, async_op=True)
            second = comm.all_reduce(np.ones(3), async_op=True)
            third = comm.all_reduce(on_device(np.ones(3)), async_op=True)
            for work in (first, second, third) if comm.rank % 2 else (third, second, first):
                work.wait()
            assert on_host(first.wait())[0] == turn
            assert on_host(third.wait())[0] == comm.size == second.wait()[0]

    run(body, 3)
    run(body, 3, check=True)


def test_events_and_streams_are_used_again() -> None:
    """An event for each plan would be 3 for each turn; other tests may have left idle ones."""

    def body(comm: Communicator) -> int:
        for _ in range(10):
            run_a_plan(comm)
        comm.barrier()
        before = gpu().num_calls["cuEventCreate"]
        comm.barrier()
        for _ in range(60):
            run_a_plan(comm)
        comm.barrier()
        return gpu().num_calls["cuEventCreate"] - before

    assert max(run(body, 3)) < 60


def test_an_abandoned_stream_is_given_back_once_though_two_threads_see_its_end() -> None:
    class TwoThreads:
        """A driver; while a thread asks whether an event is complete, another one does."""

        are_two = True

        def call(self, name: str, *arguments: Any) -> None:
            assert name == "cuEventRecord"

        def try_call(self, name: str, event: int) -> int:
            assert name == "cuEventQuery"
            if self.are_two:
                self.are_two = False
                assert streams.may_block(driver)  # type: ignore[arg-type]
            return 0

        new_stream = new_event = lambda self: 9

    streams, driver = Streams(), TwoThreads()
    assert streams.abandon(driver, Stream(1, 2))  # type: ignore[arg-type]
    assert streams.borrow(driver) == (1, 2)  # type: ignore[arg-type]
    assert streams.borrow(driver) == (9, 9)  # type: ignore[arg-type]


def test_an_abandoned_stream_is_not_lent_while_something_is_left_on_it(word: np.ndarray) -> None:
    gpu().make_current()
    streams, driver, queue = Streams(), gpu().driver, FakeStream("abandoned")
    stream = Stream(queue.ptr, driver.new_event())
    wait_for_1(queue, word)
    assert not streams.abandon(driver, stream)
    assert not streams.may_block(driver)
    assert streams.borrow(driver) != stream
    word[:] = 1
    queue.synchronize()
    assert streams.may_block(driver)
    assert streams.borrow(driver) == stream


def run_a_plan(comm: Communicator) -> None:
    plan = comm.plan.all_reduce(on_device(np.ones(3)))
    plan.run()
    plan.free()


# What goes wrong


def test_different_calls_are_refused_by_all() -> None:
    def body(comm: Communicator) -> None:
        x = on_device(np.ones(6))
        comm.all_reduce(x)
        with pytest.raises(CollectiveMismatch, match=r"rank 0: all_reduce .*; rank 2: all_gather"):
            comm.all_gather(x) if comm.rank == 2 else comm.all_reduce(x, algorithm="ring")

    run(body, 3)


def test_a_rank_that_makes_no_call_is_noticed() -> None:
    def body(comm: Communicator) -> None:
        x = on_device(np.ones(6))
        comm.all_reduce(x)
        if comm.rank:
            comm.all_reduce(x)

    with pytest.raises(CollectiveMismatch, match="deadlock, the ranks' calls do not match"):
        run(body, 3)


def test_a_failure_of_the_driver_is_raised() -> None:
    def body(comm: Communicator) -> None:
        x = on_device(np.ones(6))
        comm.all_reduce(x)
        gpu().error = 719
        comm.all_reduce(x)

    with pytest.raises(collectives.CollectiveError, match=r"719|rank \d raised"):
        run(body, 2)
    gpu().error = 0


def test_a_long_wait_for_the_device_is_in_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither holds the interpreter lock nor sleeps."""
    gpu().driver.most_outstanding = 2  # so that the call cannot be enqueued as a whole
    execute, is_frozen = gpu().execute, threading.Event()
    monkeypatch.setattr(gpu(), "execute", lambda n: 0 if is_frozen.is_set() else execute(n))

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(6))
        comm.all_reduce(x, algorithm="ring")
        comm.synchronize()
        comm.barrier()
        is_frozen.set()
        work = comm.all_reduce(x, algorithm="ring", async_op=True)
        execution = execution_of(work)
        while not waits_for_device(execution):
            work.test()
        for seconds in (0.1, 0.2):
            start = time.monotonic()
            assert not execution.advance(seconds)
            assert time.monotonic() - start >= seconds
        comm.barrier()
        is_frozen.clear()
        assert on_host(work.wait()).tolist() == [3.0] * 6

    run(body, 3)


def test_a_time_limit_names_who_is_missing() -> None:
    def body(comm: Communicator) -> str:
        x = on_device(np.ones(6))
        comm.all_reduce(x)
        if comm.rank == 1:
            comm.recv(np.empty(1), 0)
            comm.recv(np.empty(1), 2)
            comm.all_reduce(x)
            comm.all_reduce(x)
            return "this is rank 1"
        with pytest.raises(collectives.CollectiveTimeout) as caught:
            comm.all_reduce(x, timeout=0.2)
        comm.send(np.ones(1), 1)
        comm.all_reduce(x)
        return str(caught.value)

    assert all("rank 1" in found.splitlines()[0] for found in run(body, 3))


def test_a_lowering_without_awaits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: results are wrong, or memory is used that must not be used."""
    from collectives.devices import placed
    from collectives.lowering import DeviceKind, DeviceProgram

    right = placed.table_of

    def table_of(program: DeviceProgram, *others: Any) -> Any:
        kept = [x for x in program.operations if x.kind != DeviceKind.AWAIT]
        return right(DeviceProgram(tuple(kept)), *others)

    monkeypatch.setattr(placed, "table_of", table_of)

    def body(comm: Communicator) -> None:
        for _ in range(20):
            y = comm.all_reduce(on_device(np.arange(8.0) + comm.rank), algorithm="ring")
            assert on_host(y).tolist() == [4 * k + 6.0 for k in range(8)]

    with pytest.raises((AssertionError, collectives.CollectiveError)):
        run(body, 4)
    gpu().violations.clear()


def test_a_communicator_releases_everything_at_its_end() -> None:
    def body(comm: Communicator) -> None:
        other = comm.split(0)
        other.all_reduce(on_device(np.ones(3)))
        assert links_of(other) is not None
        other.free()
        assert links_of(other) is None

    run(body, 3)
