"""Blocking calls, one after the other: what times out comes first, and no array is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import CollectiveError, CollectiveTimeout, Communicator
from collectives.engines.threads import ThreadMessages
from tests.scenarios.operators import failing

Body = Callable[[Communicator], Any]


def test_no_array_of_the_callers_is_kept_alive() -> None:
    def body(comm: Communicator) -> None:
        for _ in range(3):  # the first time, the second, and from memory
            x, out = np.ones(5), np.empty(5)
            y = comm.all_reduce(x)
            comm.all_reduce(x, out=out)
            alive = [weakref.ref(array) for array in (x, out, y)]
            del x, out, y
            assert [ref() for ref in alive] == [None] * 3

    collectives.run(body, 2)


def test_results_are_the_callers_own() -> None:
    def body(comm: Communicator) -> None:
        first = comm.all_reduce(np.ones(3))
        second = comm.all_reduce(np.full(3, 2.0))
        assert first.tolist() == [2.0] * 3 and second.tolist() == [4.0] * 3
        assert not np.shares_memory(first, second)
        same = np.ones(3)
        for _ in range(2):
            comm.all_reduce(same, out=same)
        assert same.tolist() == [4.0] * 3
        strided = np.arange(6.0)[::2]
        for _ in range(2):
            assert comm.all_reduce(strided).tolist() == [0.0, 4.0, 8.0]

    collectives.run(body, 2)


def test_bad_arguments_are_refused_also_after_good_ones() -> None:
    def body(comm: Communicator) -> None:
        x, frozen = np.ones(4), np.ones(4)
        frozen.flags.writeable = False
        for _ in range(2):
            comm.all_reduce(x, out=np.empty(4))
            comm.reduce(x, root=1)
            comm.reduce(x, "sum", 1)
        for out, sentence in (
            (np.empty(8)[::2], "C-contiguous"),
            (frozen, "read-only"),
            (np.empty(3), "shape"),
            (np.empty(4, int), "dtype"),
        ):
            with pytest.raises((TypeError, ValueError), match=sentence):
                comm.all_reduce(x, out=out)
        with pytest.raises(TypeError, match="timeout"):
            comm.all_reduce(x, out=np.empty(4), timeout="soon")  # type: ignore[arg-type]
        for root in (1.0, True):
            with pytest.raises(TypeError, match="root must be an integer"):
                comm.reduce(x, root=root)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="root must be an integer"):
                comm.reduce(x, "sum", root)  # type: ignore[arg-type]
        assert comm.all_reduce(x)[0] == comm.size

    collectives.run(body, 2)


def test_every_run_is_a_call_of_its_own_in_the_ledger() -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce(np.ones(2))
        with comm.record() as ledger:
            for _ in range(4):
                comm.all_reduce(np.ones(2))
            comm.reduce_scatter(np.ones(2))
        assert [row.call for row in ledger.rows()] == ["2", "3", "4", "5", "6"]
        assert ledger.summary(by=("collective",))["all_reduce",].calls == 4

    collectives.run(body, 2)


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_a_call_that_timed_out_completes_before_the_next_one_begins(num_before: int) -> None:
    def body(comm: Communicator) -> None:
        x, out = np.ones(2), np.zeros(2)
        for _ in range(num_before):
            comm.all_reduce(x, out=out)
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout) as error:
                comm.all_reduce(2 * x, out=out, timeout=0.05)
            with pytest.raises(CollectiveTimeout):
                comm.all_reduce(3 * x, timeout=0.05)  # it has not begun: the other must end first
            comm.send(x, 1)
            assert error.value.work.wait(timeout=30) is out
            assert out.tolist() == [4.0, 4.0]
        else:
            comm.recv(x, 0)
            assert comm.all_reduce(2 * np.ones(2)).tolist() == [4.0, 4.0]
        assert comm.all_reduce(3 * np.ones(2)).tolist() == [6.0, 6.0]

    collectives.run(body, 2, timeout=20)


def test_a_call_that_timed_out_keeps_its_arrays_until_it_is_over() -> None:
    def body(comm: Communicator) -> None:
        x, out = np.ones(100_000), np.zeros(100_000)
        kept = weakref.ref(x), weakref.ref(out)
        for _ in range(3):  # now it is bound to this memory
            comm.all_reduce(x, out=out)
        if comm.rank == 0:
            for _ in range(2):
                with pytest.raises(CollectiveTimeout):
                    comm.all_reduce(x, out=out, timeout=0.05)
            del x, out
            gc.collect()
            assert [ref() is None for ref in kept] == [False, False]
            comm.send(np.ones(1), 1)
        else:
            comm.recv(np.ones(1), 0)
            comm.all_reduce(x, out=out)
            del x, out
        assert comm.all_reduce(3 * np.ones(2)).tolist() == [6.0, 6.0]
        gc.collect()
        assert [ref() is None for ref in kept] == [True, True]

    collectives.run(body, 2, timeout=20)


def test_a_call_that_failed_half_way_ends_the_communicator_and_says_so() -> None:
    def body(comm: Communicator) -> None:
        group = comm.split(0)
        assert group is not None
        with np.errstate(over="raise"), pytest.raises(FloatingPointError):
            comm.all_reduce(np.array([1e300]), "prod")
        for call in (comm.all_reduce, comm.all_gather):
            with pytest.raises(CollectiveError, match=r"is unusable: all_reduce .* half-way"):
                call(np.ones(1))
        with pytest.raises(CollectiveError, match="is unusable"):
            comm.plan.all_reduce(np.ones(1))
        assert group.all_reduce(np.ones(1))[0] == comm.size

    collectives.run(body, 2)


def test_a_call_interrupted_while_it_is_called_off_keeps_its_arrays_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            failed, out = comm._session.transport.failed, np.zeros(3)
            with pytest.raises(KeyboardInterrupt, match="the second"):
                comm.all_reduce(np.ones(3), interrupting, out=out)
            assert len(failed) == 2  # the execution, and the arrays of the call
            failed.clear()
        else:
            comm.all_reduce(np.ones(3), collectives.Operator.from_function(np.add))

    def abandoned(messages: ThreadMessages) -> bool:
        raise KeyboardInterrupt("the second")

    interrupting = failing(KeyboardInterrupt("the first"))
    monkeypatch.setattr(ThreadMessages, "abandon", abandoned)
    collectives.run(body, 2, timeout=20)


def test_a_header_has_to_wait_for_its_turn_as_well() -> None:
    def body(comm: Communicator) -> None:
        x = np.arange(4.0) if comm.rank == 1 else None
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout) as error:
                comm.all_reduce(np.ones(2), timeout=0.05)
            for call in (comm.broadcast, comm.scatter):
                with pytest.raises(CollectiveTimeout, match="all_reduce"):  # which is still to end
                    call(x, root=1, timeout=0.05)
            comm.send(np.ones(1), 1)
            assert error.value.work.wait(timeout=30).tolist() == [2.0, 2.0]
        else:
            comm.recv(np.ones(1), 0)
            comm.all_reduce(np.ones(2))
        assert comm.broadcast(x, root=1).tolist() == [0.0, 1.0, 2.0, 3.0]
        assert comm.all_reduce(np.ones(2)).tolist() == [2.0, 2.0]

    collectives.run(body, 2, timeout=20)


def test_what_is_left_of_a_call_fails_as_often_as_it_is_waited_for() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout) as error:
                comm.broadcast(np.empty(5), root=1, timeout=0.05)
            comm.send(np.ones(1), 1)
            for wait in (error.value.work.wait, error.value.work.wait, error.value.work.test):
                with pytest.raises(ValueError, match="the root sends"):
                    wait()
        else:
            comm.recv(np.ones(1), 0)
            comm.broadcast(np.ones(4), root=1)

    collectives.run(body, 2, check=False, timeout=20)


def test_a_communicator_that_waits_for_a_rest_keeps_its_time_limit() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout) as error:
                comm.broadcast(None, root=1, timeout=0.05)
            makers: list[Callable[..., Any]] = [partial(comm.split, 0), partial(comm.subgroup, [0])]
            for make in makers:
                with pytest.raises(CollectiveTimeout, match="header"):
                    make(timeout=0.05)
            comm.send(np.ones(1), 1)
            while not error.value.work.test():
                pass
            assert error.value.work.wait(timeout=30).tolist() == [1.0]
        else:
            comm.recv(np.ones(1), 0)
            comm.broadcast(np.ones(1), root=1)
        group = comm.split(0)
        assert group is not None and group.all_reduce(np.ones(1))[0] == comm.size

    collectives.run(body, 2, timeout=20)


def test_what_is_refused_after_something_went_ahead_ends_the_communicator_too() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.broadcast(np.ones(1))
        else:
            with pytest.raises(ValueError, match=r"the root sends float64 of shape \(1,\)"):
                comm.broadcast(np.empty(3))
            for call in (comm.all_reduce, comm.plan.all_reduce):
                with pytest.raises(CollectiveError, match=r"header .* failed half-way.* x is "):
                    call(np.ones(1))
            comm.free()
            with pytest.raises(CollectiveError, match=r"header .* failed half-way"):
                comm.barrier()

    collectives.run(body, 3, check=False, timeout=20)


def test_a_call_that_timed_out_and_then_fails_ends_the_communicator_too() -> None:
    def body(comm: Communicator) -> None:
        x = np.array([1e300])
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout):
                comm.all_reduce(x, "prod", timeout=0.05)
            comm.send(x, 1)
            with np.errstate(over="raise"), pytest.raises(FloatingPointError):
                comm.all_reduce(np.ones(1))  # the other one ends first, in an error
            with pytest.raises(CollectiveError, match="is unusable"):
                comm.all_reduce(np.ones(1))
        else:
            comm.recv(x.copy(), 0)
            with np.errstate(over="ignore"):
                comm.all_reduce(x, "prod")

    collectives.run(body, 2, timeout=20)
