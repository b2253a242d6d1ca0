"""Calls that came before go straight to compiled code, are right, bounded, and keep nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator, Operator, SentReceived
from collectives.diagnostics.flight_recorder import NUM_CALLS
from collectives.engines.compiled import CompiledExecution
from collectives.engines.mpi import MpiTransport
from collectives.runtime import pool
from collectives.runtime.plan import Plan
from collectives.runtime.session import Session
from collectives.runtime.work import Work

pytestmark = pytest.mark.mpi

LARGE = 300_000  # elements


@pytest.fixture
def comm(mpi_world: MPI.Intracomm) -> Iterator[Communicator]:
    made = collectives.wrap(mpi_world, check=False)
    if made._session.transport.why_interpreted:
        pytest.fail("programs are interpreted here, and no call is cached")
    yield made
    made.free()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The collectives that did not go straight to compiled code."""
    made: list[str] = []
    right = Session.spec

    def spec(self: Session, collective: str, *args: Any, **named: Any) -> Any:
        made.append(collective)
        return right(self, collective, *args, **named)

    monkeypatch.setattr(Session, "spec", spec)
    return made


def cached(comm: Communicator) -> int:
    return len(comm._session.pool)


def test_a_call_that_came_before_goes_straight_to_compiled_code(
    comm: Communicator, compiled: list[str]
) -> None:
    total = sum(range(comm.size))
    for step in range(5):
        x = np.full(3, float(step + comm.rank))  # another array every time
        assert comm.all_reduce(x)[0] == comm.size * step + total
        assert comm.all_reduce(x, "max", out=np.empty(3))[0] == step + comm.size - 1
        comm.barrier()
        whole = comm.all_gather(x, out=np.empty(3 * comm.size))
        assert whole[-1] == step + comm.size - 1
    assert sorted(compiled) == ["all_gather", "all_reduce", "all_reduce", "barrier"]


def test_every_collective_is_cached_and_right_every_time(
    comm: Communicator, compiled: list[str]
) -> None:
    p, rank = comm.size, comm.rank
    for step in range(4):
        x, rows = np.full(p, rank + step), np.arange(p) + 10 * rank + step
        ranks = np.arange(p)
        assert comm.reduce(x, root=p - 1) is None or comm.rank == p - 1
        assert comm.reduce_scatter(rows).tolist() == [10 * sum(ranks) + p * (rank + step)]
        assert comm.all_to_all(rows).tolist() == (10 * ranks + rank + step).tolist()
        assert comm.scan(x)[0] == sum(range(rank + 1)) + (rank + 1) * step
        got = comm.exscan(x)
        assert got is None if rank == 0 else got[0] == sum(range(rank)) + rank * step
        got = comm.gather(x[:1])
        assert got is None if rank else got.tolist() == (ranks + step).tolist()
        given = rows if rank == 0 else None
        assert comm.scatter(given, out=np.empty(1, int)).tolist() == [rank + step]
        assert comm.broadcast(given, out=np.empty(p, int)).tolist() == (ranks + step).tolist()
    assert len(compiled) == 8


def test_large_calls_go_to_any_array(comm: Communicator, compiled: list[str]) -> None:
    for step in range(4):
        x, out = np.full(LARGE, float(comm.rank + step)), np.empty(LARGE)
        assert comm.all_reduce(x, out=out) is out
        assert np.all(out == comm.size * step + sum(range(comm.size)))
        assert np.all(comm.all_reduce(x) == out)
    assert compiled == ["all_reduce"] * 2


def test_what_differs_in_anything_but_contents_is_another_call(
    comm: Communicator, compiled: list[str]
) -> None:
    x = np.ones(4)
    for _ in range(4):
        for array in (x, x.reshape(2, 2), x.astype(np.float32), x[:2]):
            comm.all_reduce(array)
        comm.all_reduce(x, "max")
        comm.all_reduce(x, op="max")
        comm.all_reduce(x, algorithm="reduce_broadcast")
        with collectives.using(all_reduce="linear"):
            comm.all_reduce(x)
    assert len(compiled) == 8


def test_calls_with_other_counts_are_other_calls(comm: Communicator, compiled: list[str]) -> None:
    p, rank = comm.size, comm.rank
    for counts in ([1] * p, [*range(1, p + 1)]):
        for _ in range(3):
            assert comm.all_gather(np.ones(counts[rank]), counts=counts).size == sum(counts)
            assert comm.reduce_scatter(np.ones(sum(counts)), counts=counts).size == counts[rank]
    assert len(compiled) == (4 if p > 1 else 2)  # alone both counts are the same
    with pytest.raises(TypeError, match="an entry of counts"):
        comm.all_gather(np.ones(1), counts=[1.0] * p)


def test_own_counts_are_cached_and_not_taken_for_a_table_of_equal_numbers(
    comm: Communicator, compiled: list[str]
) -> None:
    pair = comm.split(comm.rank // 2)
    assert pair is not None
    if pair.size == 2:
        own = [SentReceived([1, 2], [1, 3]), SentReceived([3, 4], [2, 4])][pair.rank]
        table = [[1, 2], [1, 3]]  # equal to rank 0's own counts, but rank 1 sends rank 0 only 1 row
        compiled.clear()
        for _ in range(3):
            assert pair.all_to_all(np.ones(sum(own.sent)), counts=own).size == sum(own.received)
            rows = pair.all_to_all(np.ones(sum(table[pair.rank])), counts=table).size
            assert rows == sum(row[pair.rank] for row in table)
        assert compiled == ["all_to_all"] * 3  # own counts are cached the second time
    pair.free()


def test_own_counts_that_come_once_do_not_displace_other_calls(
    comm: Communicator, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, x = comm.size, np.ones(5)
    monkeypatch.setattr(pool, "_MAX_KINDS", 4)
    for rows in range(8):
        counts = SentReceived([rows] * p, [rows] * p)
        assert comm.all_to_all(np.ones(rows * p), counts=counts).size == rows * p
        comm.all_reduce(x)
    assert compiled.count("all_reduce") == 1
    for rows in range(8):
        counts = SentReceived([rows] * p, [rows] * p)
        comm.all_to_all(np.ones(rows * p), counts=counts)
    comm.all_reduce(x)
    assert compiled.count("all_reduce") == 2  # as these were cached, it was not


def test_a_cached_call_with_out_is_not_taken_for_one_that_a_header_announces(
    comm: Communicator,
) -> None:
    for _ in range(3):
        given = np.arange(3.0) if comm.rank == 0 else None
        assert comm.broadcast(given, out=np.empty(3)).tolist() == [0, 1, 2]
        assert comm.broadcast(given).tolist() == [0, 1, 2]
        whole = np.arange(float(comm.size)) if comm.rank == 0 else None
        assert comm.scatter(whole, out=np.empty(1)).tolist() == [comm.rank]
        assert comm.scatter(whole).tolist() == [comm.rank]


def test_in_place_and_not_are_served_in_turns(comm: Communicator) -> None:
    for _ in range(3):
        x, out = np.ones(4), np.empty(4)
        assert comm.all_reduce(x, out=out)[0] == comm.size
        assert x.tolist() == [1] * 4
        assert comm.all_reduce(x, out=x) is x
        assert x.tolist() == [comm.size] * 4
        memory = np.ones(8)
        assert comm.all_reduce(memory[:4], out=memory[2:6])[0] == comm.size


def test_what_compiled_code_cannot_serve_is_served_all_the_same(comm: Communicator) -> None:
    for _ in range(3):
        assert comm.all_reduce(np.ones(8)[::2]).tolist() == [comm.size] * 4
        assert comm.all_reduce(np.ones(4, np.longdouble))[0] == comm.size
        assert comm.all_reduce(np.ones(4), Operator.from_function(np.add))[0] == comm.size
        assert comm.all_reduce(np.ones(4, ">f8"))[0] == comm.size
        odd = np.zeros(33, np.uint8)[1:].view(np.float64)
        odd[:] = 1
        assert comm.all_reduce(odd).tolist() == [comm.size] * 4
        assert comm.all_gather(np.zeros((1,) * 12)).shape[0] == comm.size


def test_plans_of_what_compiled_code_cannot_begin_run_all_the_same(comm: Communicator) -> None:
    odd = np.zeros(33, np.uint8)[1:].view(np.float64)
    odd[:] = 1
    deep, frozen = np.ones((1,) * 12), np.ones(3)
    for x in (odd, deep, frozen):
        plan = comm.plan.all_reduce(x)
        for _ in range(2):
            assert plan.run().ravel()[0] == comm.size
            plan.start()
            assert plan.wait().ravel()[0] == comm.size
            plan.result.flags.writeable = x is not frozen
        plan.free()


@pytest.mark.parametrize("kind", ["datetime64[s]", "float32", "bool", "int16,float64", "S3"])
def test_calls_of_any_dtype_are_cached(comm: Communicator, compiled: list[str], kind: str) -> None:
    x = np.zeros(3000, kind)
    x.flags.writeable = comm.rank == 0
    for _ in range(3):
        out = np.empty(comm.size * x.size, kind)
        assert np.array_equal(comm.all_gather(x, out=out), np.concatenate([x] * comm.size))
    assert compiled == ["all_gather"]


def test_bad_arguments_are_refused_also_after_good_ones(comm: Communicator) -> None:
    x, frozen = np.ones(4), np.ones(4)
    frozen.flags.writeable = False
    for _ in range(2):
        comm.all_reduce(x, out=np.empty(4))
        comm.reduce(x, root=0)
        comm.reduce(x, "sum", 0)
    for out, sentence in (
        (np.empty(8)[::2], "C-contiguous"),
        (frozen, "read-only"),
        (np.empty(3), "shape"),
        (np.empty((4, 1)), "shape"),
        (np.empty(4, int), "dtype"),
        ([0.0] * 4, "must be a NumPy"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            comm.all_reduce(x, out=out)
    with pytest.raises(TypeError, match="timeout"):
        comm.all_reduce(x, out=np.empty(4), timeout="soon")  # type: ignore[arg-type]
    for root in (0.0, False):
        with pytest.raises(TypeError, match="root must be an integer"):
            comm.reduce(x, "sum", root)  # type: ignore[arg-type]
    assert comm.all_reduce(x)[0] == comm.size


@pytest.mark.parametrize("way", ["call", "async_op", "plan"])
def test_an_out_that_is_left_as_it_is_is_checked_every_time(comm: Communicator, way: str) -> None:
    def exscan(out: Any) -> None:
        if way == "plan":
            comm.plan.exscan(x, out=out).run()
        elif way == "async_op":
            comm.exscan(x, out=out, async_op=True).wait()
        else:
            comm.exscan(x, out=out)

    x = np.ones(4)
    for _ in range(3):
        out = np.full(4, 7.0)
        exscan(out)
        assert out.tolist() == [float(comm.rank or 7)] * 4
        for bad in (np.zeros(5), np.zeros(4, np.int32), np.zeros(8)[::2]):
            with pytest.raises((TypeError, ValueError), match="out"):
                exscan(bad)
    assert comm.all_reduce(x)[0] == comm.size  # all count alike


def test_no_array_of_the_callers_is_kept_alive(comm: Communicator) -> None:
    for _ in range(3):
        x, out = np.ones(5), np.empty(5)
        y = comm.all_reduce(x)
        comm.all_reduce(x, out=out)
        alive = [weakref.ref(array) for array in (x, out, y)]
        del x, out, y
        assert not [ref for ref in alive if ref() is not None]


def test_the_number_of_cached_calls_is_bounded(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_MAX_KINDS", 16)
    for length in range(1, pool._MAX_KINDS + 20):
        assert comm.all_reduce(np.ones(length, np.int8))[-1] == comm.size
        assert 0 < cached(comm) <= pool._MAX_KINDS


def test_the_number_of_idle_executions_of_a_call_is_bounded(comm: Communicator) -> None:
    for _ in range(2):
        works = [comm.all_reduce(np.full(3, n), async_op=True) for n in range(50)]
        assert [work.wait()[0] for work in works] == [n * comm.size for n in range(50)]
    idle = [len(kind.idle) for kind in comm._session.pool._kinds.values()]
    assert 0 < max(idle) <= pool._MAX_IDLE


def test_a_plan_like_one_that_was_freed_takes_its_execution(
    comm: Communicator, compiled: list[str]
) -> None:
    x, out, total = np.empty(3), np.empty(3), sum(range(comm.size))
    runs = []
    with comm.record() as ledger:
        for step in range(4):
            x[:] = step + comm.rank
            plan = comm.plan.all_reduce(x, out=out)
            runs.append(plan._prepared)
            for _ in range(2):
                assert plan.run() is out and out[0] == comm.size * step + total
            plan.free()
    assert compiled == ["all_reduce"]
    assert runs[0] is runs[1] is runs[2] is runs[3]
    if comm.size > 1:
        numbers = list(dict.fromkeys(row.call for row in ledger.rows()))
        assert numbers == [f"{n}{again}" for n in range(1, 5) for again in ("", ".2")]
    calls = [call["call"] for call in comm.last_calls()[-8:]]
    assert calls == [f"{n}{again}" for n in range(1, 5) for again in ("", ".2")]


def test_plans_of_one_look_may_be_under_way_at_once(comm: Communicator) -> None:
    for _ in range(2):
        arrays = [np.full(3, float(n)) for n in range(5)]
        plans = [comm.plan.all_reduce(x) for x in arrays]
        for plan in plans:
            plan.start()
        results = [plan.wait() for plan in reversed(plans)]
        assert [result[0] for result in results[::-1]] == [n * comm.size for n in range(5)]
        for plan in plans:
            plan.free()


def test_a_plan_that_was_freed_does_nothing_to_the_one_that_has_its_execution(
    comm: Communicator,
) -> None:
    x, out = np.ones(3), np.empty(3)
    plans = []
    for _ in range(3):  # all have the same execution, one after the other
        plans.append(comm.plan.all_reduce(x, out=out))
        if len(plans) < 3:
            plans[-1].free()
    freed, taken = plans[1:]
    freed.free()
    title = freed.title
    assert taken.run()[0] == comm.size
    with pytest.raises(RuntimeError, match="call 2 was freed"):
        freed.start()
    assert freed.title == title and "call 3" in taken.title
    assert taken.run()[0] == comm.size
    taken.free()


def test_two_that_free_a_plan_at_once_give_its_execution_back_once(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, title = [comm.plan.all_reduce(np.ones(3)) for _ in range(2)], Plan.title.fget

    def interrupted(self: Plan) -> str:
        self.free()  # by another thread, at this moment
        return str(title(self))  # type: ignore[misc]

    monkeypatch.setattr(Plan, "title", property(interrupted))
    for plan in plans:
        plan.free()
    monkeypatch.undo()
    for _ in range(3):
        assert comm.plan.all_reduce(np.ones(3)).run()[0] == comm.size  # type: ignore[index]


def test_plans_of_other_sizes_make_one_execution_each(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    right = MpiTransport.execution

    def execution(self: MpiTransport, *args: Any) -> Any:
        made.append(args[0].num_rounds)
        return right(self, *args)

    monkeypatch.setattr(MpiTransport, "execution", execution)
    for length in (3, 5, 7, 9):
        assert comm.plan.all_reduce(np.ones(length)).run()[-1] == comm.size  # type: ignore[index]
    assert len(made) == 4
    for length in (3, 5, 7, 9):  # none was freed
        comm.plan.all_reduce(np.ones(length))
    assert len(made) == 8


def test_a_plan_of_an_equal_dtype_takes_the_execution_of_one_that_was_freed(
    comm: Communicator,
) -> None:
    for step in range(4):
        x = np.full(3, step + comm.rank, np.dtype([("a", np.int16)]))  # another object every time
        plan = comm.plan.all_gather(x)
        for _ in range(2):
            got = plan.run()
            assert got is not None and got["a"][-1] == step + comm.size - 1
        plan.free()
    assert comm.last_calls()[-1]["call"] == "4.2"


def test_no_array_of_a_plan_is_kept_alive(comm: Communicator) -> None:
    for is_freed in (True, False, True):
        x, out = np.ones(5), np.empty(5)
        plan = comm.plan.all_reduce(x, out=out)
        plan.run()
        if is_freed:
            plan.free()
        alive = [weakref.ref(array) for array in (x, out)]
        del x, out, plan
        gc.collect()
        assert not [ref for ref in alive if ref() is not None]


def test_the_log_forgets_plans_that_were_freed(comm: Communicator) -> None:
    x = np.ones(3)
    for _ in range(6 * NUM_CALLS):
        plan = comm.plan.all_reduce(x)
        plan.run()
        plan.free()
    assert len(comm._session.transport.log._runs) <= 4 * NUM_CALLS


def test_bad_plans_are_refused_also_after_good_ones(comm: Communicator) -> None:
    x, out = np.ones(4), np.empty(4)
    for _ in range(2):
        comm.plan.all_reduce(x, out=out)
        with pytest.raises(TypeError, match="a plan takes no async_op or timeout"):
            comm.plan.all_reduce(x, out=out, timeout=1)
        with pytest.raises(TypeError, match="a plan takes no async_op or timeout"):
            comm.plan.all_reduce(x, out=out, async_op=True)
        with pytest.raises(ValueError, match="C-contiguous"):
            comm.plan.all_reduce(np.ones(8)[::2], out=out)
    assert comm.plan.all_reduce(x, out=x).run()[0] == comm.size  # in place is another look


def test_every_run_is_a_call_of_its_own_in_the_ledger(comm: Communicator) -> None:
    comm.all_reduce(np.ones(2))
    with comm.record() as ledger:
        for _ in range(4):
            comm.all_reduce(np.ones(2))
    comm.all_reduce(np.ones(2))
    assert comm.size == 1 or {row.call for row in ledger.rows()} == {"2", "3", "4", "5"}
    assert [call["call"] for call in comm.last_calls()[-6:]] == ["1", "2", "3", "4", "5", "6"]


def test_communicators_made_while_somebody_records_are_recorded(comm: Communicator) -> None:
    group = comm.split(0)
    assert group is not None
    group.barrier()
    with comm.record() as ledger:
        group.barrier()
        inner = group.split(0)
        assert inner is not None
        inner.barrier()
    sent = ledger.summary(by=("collective",)).get(("barrier",))
    assert comm.size == 1 or (sent is not None and sent.calls == 2)
    inner.free()
    group.free()


def test_what_times_out_in_compiled_code_goes_on(comm: Communicator) -> None:
    if comm.size == 1:
        return
    x = np.ones(3)
    for _ in range(2):
        comm.all_reduce(x)
    comm.barrier()
    if comm.rank == 0:
        with pytest.raises(collectives.CollectiveTimeout, match="all_reduce") as error:
            comm.all_reduce(2 * x, timeout=0.05)
        with pytest.raises(collectives.CollectiveTimeout):
            comm.all_reduce(3 * x, timeout=0.05)  # it has not begun: the other must end first
        comm.send(x, 1)
        assert error.value.work.wait(timeout=30).tolist() == [2.0 * comm.size] * 3
    else:
        if comm.rank == 1:
            comm.recv(x, 0)
        assert comm.all_reduce(2 * np.ones(3))[0] == 2.0 * comm.size
    assert comm.all_reduce(3 * np.ones(3))[0] == 3.0 * comm.size


def test_a_loaded_table_of_decisions_reaches_calls_that_came_before(
    comm: Communicator, tmp_path: Any
) -> None:
    for _ in range(2):
        comm.all_reduce(np.ones(4))
    path = tmp_path / "decisions.json"
    row = '{"up_to": null, "best": ["linear"]}'
    measured = f'{{"facts": {{}}, "tables": {{"all_reduce": [{row}]}}}}'
    path.write_text(f'{{"machine": null, "measured": {{"{comm.size}": {measured}}}}}')
    comm.load_decisions(path)
    comm.all_reduce(np.ones(4))
    assert comm.last_calls()[-1]["algorithm"] == "linear"


def test_explain_says_what_runs_the_program(comm: Communicator) -> None:
    x = np.ones(4)
    assert "run by: compiled code\n" in str(comm.explain("all_reduce", x))
    own = Operator.from_function(np.add)
    assert "Python where it combines float64 by add" in comm.explain("all_reduce", x, op=own).run_by
    wide = np.ones(4, np.longdouble)
    assert "Python where it combines" in comm.explain("all_reduce", wide).run_by
    assert comm.explain("all_gather", wide).run_by == "compiled code"


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_cached_call_says_what_it_fails_with(comm: Communicator, is_recorded: bool) -> None:
    if comm.size == 1:
        return
    group = comm.split(0 if comm.rank < 2 else None)
    if group is None:
        return
    for count in (3, 5, 3, 5):
        group.all_reduce(np.ones(count))
    with ExitStack() as stack:
        if is_recorded:
            stack.enter_context(group.record())
        with pytest.raises(collectives.CollectiveMismatch, match="did not make the same call"):
            group.all_reduce(np.ones(3 if comm.rank else 5))
    with pytest.raises(collectives.CollectiveError, match="is unusable"):
        group.all_reduce(np.ones(3))
    group._session.transport.comm.Free()


def interrupting(self: Work, deadline: float | None) -> float:
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_signal_while_python_waits_ends_the_call_and_keeps_its_arrays(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    if comm.size == 1:
        return
    group = comm.split(0)
    assert group is not None
    for _ in range(2):
        group.reduce(np.ones(3), out=np.empty(3) if comm.rank == 0 else None)
    comm.barrier()
    if comm.rank == 0:  # the root only receives, and the others do not call
        failed = group._session.transport.failed
        right, before = CompiledExecution.abandon, len(failed)
        monkeypatch.setattr(CompiledExecution, "abandon", lambda self: right(self) and False)
        monkeypatch.setattr(Work, "_max_wait", interrupting)
        x, out = np.ones(3), np.empty(3)
        with ExitStack() as stack:
            if is_recorded:
                stack.enter_context(group.record())
            with pytest.raises(KeyboardInterrupt):
                group.reduce(x, out=out)
        arrays = weakref.ref(x), weakref.ref(out)
        del x, out
        gc.collect()
        assert all(array() is not None for array in arrays)  # as if MPI could still write to them
        del failed[before:]
        gc.collect()
        assert all(array() is None for array in arrays)
        with pytest.raises(collectives.CollectiveError, match=r"is unusable: reduce .* half-way"):
            group.reduce(np.ones(3))
        monkeypatch.undo()
    comm.barrier()
    group._session.transport.comm.Free()


def test_runs_of_a_plan_of_messages_are_shown_as_what_they_are(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.barrier()
    plan = comm.plan.send_recv(np.ones(3), right, left)
    for _ in range(3):
        plan.run()
    plan.free()
    shown = [(call["collective"], call["call"]) for call in comm.last_calls()[-3:]]
    assert shown == [("send_recv", "p1"), ("send_recv", "p1.2"), ("send_recv", "p1.3")]


class Interrupted:
    """Compiled code after which a signal comes before Python knows what it has answered."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __call__(self, *args: int) -> int:
        self._run(*args[:-1], 0)
        raise KeyboardInterrupt("in between")


def test_a_signal_between_compiled_code_and_python_ends_the_call(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.size == 1:
        return
    group, x = comm.split(0), np.ones(3)
    assert group is not None
    plan = comm.plan.reduce(x)
    for _ in range(2):
        group.reduce(x)
        plan.run()
    comm.barrier()
    if comm.rank == 0:  # the root only receives, and the others do not call
        (make,) = group._session.pool.latest.values()
        cached: Any = make.__self__  # type: ignore[attr-defined]
        monkeypatch.setattr(cached, "_compiled", Interrupted(cached._compiled))
        with pytest.raises(KeyboardInterrupt, match="in between"):
            group.reduce(x)
        with pytest.raises(collectives.CollectiveError, match=r"is unusable: reduce .* half-way"):
            group.reduce(x)
        monkeypatch.setattr(plan, "_compiled", Interrupted(plan._compiled))
        with pytest.raises(KeyboardInterrupt, match="in between"):
            plan.run()
        with pytest.raises(RuntimeError, match="has failed"):
            plan.run()
    comm.barrier()
    if comm.rank:
        plan.free()
    group._session.transport.comm.Free()
