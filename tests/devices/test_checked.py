"""Checked mode on devices: the ranks compare calls by their records, and send nothing for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import CollectiveError, CollectiveMismatch, CollectiveTimeout, Communicator
from collectives.engines.host_memory import NUM_SLOTS
from tests.fakes.device import BACKEND, on_device, on_host
from tests.inside import transport_of

pytestmark = pytest.mark.usefixtures("new_gpu")


def run(body: Callable[[Communicator], Any], size: int, **options: Any) -> list[Any]:
    return collectives.run(body, size, timeout=60, check=True, **options)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(CollectiveMismatch) as caught:
        call()
    return str(caught.value)


def test_calls_and_plans_send_nothing_for_it() -> None:
    def body(comm: Communicator) -> int:
        x, y = on_device(np.ones(6)), on_device(np.ones(6))
        with comm.record() as ledger:
            for _ in range(4):
                assert on_host(comm.all_reduce(x, out=y)).tolist() == [3.0] * 6
            plan = comm.plan.all_gather(x)
            for _ in range(3):
                assert on_host(plan.run()).tolist() == [1.0] * 18
            works = [comm.all_reduce(x, async_op=True) for _ in range(3)]
            assert all(on_host(work.wait())[0] == 3 for work in works)
            plan.free()
        return sum(row.collective == "check" for row in ledger.rows())

    assert run(body, 3) == [0, 0, 0]
    assert BACKEND.bytes_to_host == 0


def test_a_host_call_is_compared_by_messages() -> None:
    """The negative control of the test above."""

    def body(comm: Communicator) -> int:
        with comm.record() as ledger:
            comm.all_reduce(np.ones(3))
        return sum(row.collective == "check" for row in ledger.rows())

    assert min(run(body, 3)) > 0


@pytest.mark.parametrize("num_before", [0, 3])
def test_different_calls_are_refused_by_all_with_the_same_sentence(num_before: int) -> None:
    def body(comm: Communicator) -> list[str]:
        x, y = on_device(np.ones(6)), on_device(np.ones(6))
        for _ in range(num_before):
            comm.all_reduce(x, out=y)
        sentences = [
            refused(partial(comm.all_reduce, x, "max" if comm.rank == 1 else "sum", out=y)),
            refused(partial(comm.scan if comm.rank == 2 else comm.all_reduce, x)),
            refused(partial(comm.all_reduce, on_device(np.ones(6 + (comm.rank == 0))))),
        ]
        assert on_host(comm.all_reduce(x, out=y)).tolist() == [3.0] * 6  # all goes on
        return sentences

    found = run(body, 3)
    assert found[0] == found[1] == found[2]
    assert "rank 1 called all_reduce(op=max)" in found[0][0]
    assert "rank 2 called scan" in found[0][1]
    assert "layout=(7,)" in found[0][2]


def test_a_call_that_is_refused_does_not_let_the_next_one_be_refused() -> None:
    """Even if some ranks have started the next one before the first is compared."""

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(6))
        first = comm.all_reduce(x, "max" if comm.rank == 1 else "sum", async_op=True)
        if comm.rank == 2:
            refused(partial(wait_by_testing, first))
        second = comm.all_reduce(x, async_op=True)
        if comm.rank != 2:
            refused(first.wait)
        assert on_host(second.wait()).tolist() == [3.0] * 6

    run(body, 3)


def wait_by_testing(work: collectives.Work) -> None:
    while not work.test():
        pass


def test_refused_calls_give_their_slots_back() -> None:
    """Even where a rank has no record, because it exchanges a header first."""

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(6))
        for _ in range(NUM_SLOTS + 1):
            refused(partial(comm.broadcast if comm.rank == 0 else comm.all_reduce, x))
        assert on_host(comm.all_reduce(x)).tolist() == [3.0] * 6

    run(body, 3)
    assert BACKEND.bytes_to_host == 0


def test_a_header_that_only_one_rank_exchanges_is_noticed() -> None:
    def body(comm: Communicator) -> str:
        x = on_device(np.ones(6))
        for _ in range(2):
            received = comm.broadcast(x if comm.rank == 0 else None)
            assert on_host(received).tolist() == [1.0] * 6
        if comm.rank == 0:
            sentence = refused(partial(comm.broadcast, x))
        else:
            sentence = refused(partial(comm.all_reduce, x))
        assert on_host(comm.all_reduce(x)).tolist() == [3.0] * 6
        return sentence

    found = run(body, 3)
    assert found[0] == found[1] == found[2]
    assert "rank 0 called broadcast" in found[0]


def test_a_plan_that_meets_a_call_is_noticed() -> None:
    def body(comm: Communicator) -> list[str]:
        x, sentences = on_device(np.ones(6)), []
        comm.barrier()
        plan = comm.plan.all_reduce(x)
        sentences.append(refused(plan.run if comm.rank == 0 else partial(comm.all_reduce, x)))
        again = comm.plan.all_reduce(x)
        assert on_host(again.run()).tolist() == [3.0] * 6
        other = again.run if comm.rank == 1 else partial(comm.all_reduce, np.ones(6))
        sentences.append(refused(other))
        if comm.rank == 2:
            comm.plan.all_reduce(x)  # one more than the other ranks have
        sentences.append(refused(partial(comm.all_reduce, x)))
        assert on_host(comm.all_reduce(x)).tolist() == [3.0] * 6
        return sentences

    found = run(body, 3)
    assert found[0] == found[1] == found[2]
    assert all("in call" in sentence for sentence in found[0])


def test_a_plan_whose_header_only_one_rank_exchanges_is_noticed() -> None:
    def body(comm: Communicator) -> str:
        comm.barrier()
        x = on_device(np.ones(6))
        if comm.rank == 0:
            return refused(partial(comm.plan.broadcast, x))
        return refused(comm.plan.broadcast(None, out=x).run)

    found = run(body, 2)
    assert found[0] == found[1]
    assert "out=" in found[0]


def test_a_time_limit_in_a_comparison_by_messages_names_who_is_missing() -> None:
    def body(comm: Communicator) -> str:
        x = on_device(np.ones(6))
        comm.all_reduce(x)
        if comm.rank == 2:
            comm.recv(np.empty(1), 0)
            comm.recv(np.empty(1), 1)
            assert on_host(comm.all_reduce(x)).tolist() == [3.0] * 6
            return ""
        with pytest.raises(CollectiveTimeout) as caught:
            comm.all_reduce(x if comm.rank else np.ones(6), timeout=1)
        comm.send(np.ones(1), 2)
        assert on_host(caught.value.work.wait()).tolist() == [3.0] * 6
        return str(caught.value)

    assert all("for a message from rank 2" in found.splitlines()[0] for found in run(body, 3)[:2])


def test_a_comparison_by_messages_that_fails_is_logged_as_failed() -> None:
    def body(comm: Communicator) -> list[int]:
        if comm.rank == 2:
            comm.recv(np.empty(1), 0)
            comm.recv(np.empty(1), 1)
            return [0, 0]
        x = np.ones(6) if comm.rank == 0 else on_device(np.ones(6))
        work = comm.all_reduce(x, async_op=True)
        with pytest.raises(CollectiveTimeout):
            work.wait(timeout=0.3)
        comm.send(np.ones(1), 2)
        lines = transport_of(comm).flight.lines
        before = lines().count("under way")
        work.give_up(CollectiveError("given up"))
        return [before > 0, lines().count("under way")]

    assert run(body, 3) == [[1, 0], [1, 0], [0, 0]]


@pytest.mark.parametrize("mode", [True, "finite"])
@pytest.mark.slow
def test_some_ranks_may_have_host_arrays(mode: Any) -> None:
    def body(comm: Communicator) -> None:
        x, on_the_host = on_device(np.ones(6)), np.ones(6)
        for turn in range(12):
            mine = on_the_host if turn % 4 == comm.rank else x
            assert on_host(comm.all_reduce(mine)).tolist() == [3.0] * 6
            received = comm.broadcast(mine if comm.rank == 1 else None, root=1)
            assert on_host(received).tolist() == [1.0] * 6
        plan = comm.plan.all_reduce(on_the_host if comm.rank == 1 else x)
        for _ in range(3):
            assert on_host(plan.run()).tolist() == [3.0] * 6
        works = [
            comm.all_reduce(x if (k + comm.rank) % 3 else on_the_host, async_op=True)
            for k in range(6)
        ]
        assert all(on_host(work.wait()).tolist() == [3.0] * 6 for work in works)
        if comm.rank == 2:
            mismatch = refused(partial(comm.all_reduce, x, "max"))
        else:
            mismatch = refused(partial(comm.all_reduce, on_the_host if comm.rank else x))
        assert "rank 2 called all_reduce(op=max)" in mismatch
        plan.free()

    collectives.run(body, 3, timeout=60, check=mode)
