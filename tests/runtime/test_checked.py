"""Checked mode: ranks that differ are told so, all of them, before anything is sent."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import CollectiveMismatch, CollectiveTimeout, Communicator, NotFinite
from collectives.runtime.fingerprint import DIGEST_BYTES
from collectives.runtime.numbering import Numbering
from tests import hygiene
from tests.fakes.device import on_device, on_host
from tests.scenarios.mismatches import MISTAKES, Mistake, make, noticed, still_works
from tests.scenarios.sessions import SCENARIOS

SIZES = [1, 2, 3, 4, 7]
Body = Callable[[Communicator], Any]


def checked(body: Body, size: int, check: Any = True) -> list[Any]:
    return collectives.run(body, size, check=check, timeout=20)


def told(body: Body, size: int, kind: type[Exception], check: Any = True) -> str:
    """What all ranks are told; it must be the same."""

    def rank(comm: Communicator) -> str:
        with pytest.raises(kind) as error:
            body(comm)
        still_works(comm)
        return str(error.value)

    sentences = checked(rank, size, check)
    assert len(set(sentences)) == 1, sentences
    return sentences[0]


# What differs


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
@pytest.mark.slow
def test_every_rank_is_told_who_differs_in_what(mistake: Mistake, size: int) -> None:
    checked(lambda comm: noticed(comm, mistake), size)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_ranks_are_told_and_stay_in_step_where_values_are_looked_at(mistake: Mistake) -> None:
    checked(lambda comm: noticed(comm, mistake), 3, "finite")


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_without_checking_the_same_mistake_is_not_told_so(mistake: Mistake) -> None:
    def body(comm: Communicator) -> None:
        with np.errstate(all="ignore"):  # bytes of one dtype taken for another may be anything
            make(comm, mistake)

    if mistake.alone != "noticed":
        collectives.run(body, 2, check=False, timeout=20)
        hygiene.begin()  # messages may be left that nobody expected: a mistake, but not ours
        return
    with pytest.raises((collectives.CollectiveError, ValueError)) as error:
        collectives.run(body, 2, check=False, timeout=20)
    assert "called" not in str(error.value)


def test_the_sentence_names_the_call_and_the_line_of_the_program() -> None:
    def body(comm: Communicator) -> None:
        comm.barrier()
        comm.all_reduce(np.ones(3), "prod" if comm.rank == 2 else "sum")

    line = body.__code__.co_firstlineno + 2
    assert told(body, 4, CollectiveMismatch) == (
        "rank 2 called all_reduce(op=prod), ranks 0, 1, 3 op=sum "
        f"(call 2, from test_checked.py:{line})"
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_asynchronous_calls_and_plans_are_told_by_their_wait(size: int) -> None:
    def body(comm: Communicator) -> None:
        op = "max" if comm.rank == 1 else "min"
        good = [comm.all_reduce(np.array([i]), async_op=True) for i in range(3)]
        bad = comm.all_reduce(np.ones(1), op, async_op=True)
        plan = comm.plan.all_reduce(np.ones(1), op)
        good += [comm.all_reduce(np.array([i]), async_op=True) for i in range(3, 6)]
        plan.start()
        assert [work.wait()[0] for work in good[:: (-1) ** comm.rank]] == [
            i * comm.size for i in range(6)
        ][:: (-1) ** comm.rank]
        for each in (bad, plan):
            for _ in range(2):
                with pytest.raises(CollectiveMismatch, match=r"rank 1 called all_reduce\(op=max"):
                    each.wait()
        still_works(comm)

    checked(body, size)


def test_a_rank_that_learns_of_a_mismatch_before_others_call_on_counts_as_they_do() -> None:
    def body(comm: Communicator) -> None:
        bad = comm.all_reduce(np.ones(1), "max" if comm.rank == 1 else "min", async_op=True)
        if comm.rank == 1:
            with pytest.raises(CollectiveMismatch):
                bad.wait()
        good = [comm.all_reduce(np.array([i]), async_op=True) for i in range(4)]
        assert [work.wait()[0] for work in good] == [2 * i for i in range(4)]
        with pytest.raises(CollectiveMismatch):
            bad.wait()
        still_works(comm)

    checked(body, 2)


def test_tags_of_fingerprints_are_nobody_elses_when_they_begin_again() -> None:
    numbering = Numbering(num_tags=4 * 5)
    # 15 is that of blocking calls, 16 that of ranks which make a communicator.
    assert {numbering.check_tag(numbering.next_check()) for _ in range(20)} == {17, 18, 19}


def test_a_blocking_and_an_asynchronous_call_meet() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.all_reduce(np.ones(3), async_op=True).wait()
        else:
            comm.all_reduce(np.ones((3, 1)))

    assert "layout" in told(body, 3, CollectiveMismatch)


def test_calls_that_are_remembered_are_checked_every_time() -> None:
    def body(comm: Communicator) -> None:
        for _ in range(4):
            assert comm.all_reduce(np.ones(4))[0] == comm.size
            comm.all_reduce(np.ones(4), "max")
        with pytest.raises(CollectiveMismatch, match=r"rank 2 called all_reduce\(op=max"):
            comm.all_reduce(np.ones(4), "max" if comm.rank == 2 else "sum")
        assert comm.all_reduce(np.ones(4))[0] == comm.size

    checked(body, 4)


def test_a_remembered_call_is_in_place_or_not_each_time_anew() -> None:
    def body(comm: Communicator) -> None:
        x, y = np.ones(4), np.empty(4)
        for out in (x, y, x, x, y):
            comm.all_reduce(x, out=out)
        comm.all_reduce(x, out=y if comm.rank else x)

    assert "called all_reduce(in_place=yes)" in told(body, 3, CollectiveMismatch)


def test_what_concerns_the_root_alone_may_differ() -> None:
    def body(comm: Communicator) -> None:
        x, whole = np.ones(2), np.empty(2 * comm.size)
        comm.gather(x, out=whole if comm.rank == 0 else None)
        comm.reduce(x, out=x if comm.rank == 0 else np.empty(2))
        comm.exscan(x, out=x)
        comm.broadcast(np.ones(3) if comm.rank == 0 else None)
        comm.scatter(whole if comm.rank == 0 else None)
        comm.all_gather(np.ones(0), out=np.empty(0))
        comm.all_reduce(np.asfortranarray(np.ones((2, 3))) if comm.rank else np.ones((2, 3)))

    for size in SIZES:
        checked(body, size)


def test_being_read_from_a_copy_is_not_being_in_place_however_often_it_is_called() -> None:
    def body(comm: Communicator) -> None:
        for _ in range(4):
            x = np.arange(10.0)
            strided, out = x[::2], x[:5] if comm.rank == 0 else np.empty(5)
            comm.all_reduce(strided, out=out)
            assert out.tolist() == [comm.size * float(i) for i in range(0, 10, 2)]

    checked(body, 3)


def test_communicators_made_from_a_checked_one_are_checked() -> None:
    def body(comm: Communicator) -> None:
        group = comm.split(comm.rank % 2)
        assert group is not None and group.check is True
        with pytest.raises(CollectiveMismatch, match=r"rank 1 .*\(call \[[01],[23]\]1, from"):
            group.all_reduce(np.ones(1), "max" if group.rank else "min")
        pair = comm.subgroup([comm.rank, comm.rank ^ 1][:: 1 if comm.rank % 2 == 0 else -1])
        with pytest.raises(CollectiveMismatch):
            pair.barrier() if pair.rank else pair.scan(np.ones(1))
        still_works(comm)

    checked(body, 4)


def test_what_the_library_sends_for_itself_is_checked_too() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.split(0)
        else:
            comm.barrier()

    assert told(body, 3, CollectiveMismatch).startswith("rank 1 called split from")


def test_ranks_of_which_one_has_another_mode_are_told() -> None:
    def body(comm: Communicator) -> None:
        comm._session.checker.mode = "finite" if comm.rank == 0 else "calls"  # type: ignore[union-attr]
        with pytest.raises(CollectiveMismatch, match=r"mode=finite.*mode=calls"):
            comm.barrier()

    checked(body, 3)


# Nothing else differs


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
@pytest.mark.slow
def test_checked_mode_changes_no_program(scenario: Body, size: int) -> None:
    checked(scenario, size, "finite" if size == 4 else True)


def test_a_time_limit_names_whom_the_check_waits_for() -> None:
    has_given_up = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout, match="round 0 of 2 of its check for a") as error:
                comm.all_reduce(np.ones(1), timeout=0.05)
            has_given_up.set()
            assert error.value.work.wait(timeout=30)[0] == comm.size
        else:
            has_given_up.wait(10)
            comm.all_reduce(np.ones(1))
        still_works(comm)

    checked(body, 3)


def test_arrays_are_let_go_when_a_call_is_over() -> None:
    def body(comm: Communicator) -> None:
        x = np.ones(300_000)
        dead = weakref.ref(x)
        comm.all_reduce(x, async_op=True).wait()
        del x
        assert dead() is None

    gc.disable()
    try:
        checked(body, 2)
    finally:
        gc.enable()


# The ledger


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_what_is_exchanged_has_rows_of_its_own(size: int) -> None:
    def body(comm: Communicator) -> Any:
        plan = comm.plan.all_reduce(np.ones(2))
        with comm.record() as ledger:
            comm.barrier()
            comm.broadcast(np.ones(2))  # with a header
            comm.all_reduce(np.ones(2))
            comm.all_reduce(np.ones(2), async_op=True).wait()
            plan.run()
            plan.run()
        sent = ledger.summary(by=("collective", "algorithm")).get(("check", "bruck"))
        rounds = (size - 1).bit_length()
        if size > 1:
            assert sent is not None and sent.bytes == num_bytes * (size - 1)
            assert sent.messages == 7 * rounds
        calls = {(row.collective, row.call) for row in ledger.rows()}
        assert {number for name, number in calls if name != "check"} <= {
            number for name, number in calls if name == "check"
        }
        return ledger.gather()

    num_bytes = 7 * DIGEST_BYTES
    whole = checked(body, size)[0]
    assert DIGEST_BYTES == 16
    total = whole.summary(by=("collective",)).get(("check",))
    assert (0 if total is None else total.bytes) == num_bytes * size * (size - 1)


def test_a_call_that_was_stopped_has_sent_nothing() -> None:
    def body(comm: Communicator) -> list[str]:
        plan = comm.plan.all_reduce(np.ones(1), "max" if comm.rank else "min")
        with comm.record() as ledger:
            with pytest.raises(CollectiveMismatch):
                comm.all_reduce(np.ones(1), "max" if comm.rank else "min")
            work = comm.all_reduce(np.ones(1), "max" if comm.rank else "min", async_op=True)
            with pytest.raises(CollectiveMismatch):
                work.wait()
            with pytest.raises(CollectiveMismatch):
                plan.run()
        return [row.collective for row in ledger.rows()]

    assert checked(body, 2) == [["check"] * 6] * 2  # a digest, and as they differ all of it


# Values that are no finite numbers


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_is_told_who_brings_what(size: int, dtype: str) -> None:
    import ml_dtypes

    def body(comm: Communicator) -> None:
        x = np.ones((3, 4), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        if comm.rank == comm.size - 1:
            x[1, 2], x[2, 0] = np.nan, np.inf
        comm.all_gather(x)

    said = told(body, size, NotFinite, "finite")
    value = r"(nan+0j)" if dtype == "complex64" else "nan"
    line = body.__code__.co_firstlineno + 4
    assert said == (
        f"rank {size - 1} brings {value} at [1, 2] to all_gather "
        f"(call 1, from test_checked.py:{line})"
    )


def test_all_ranks_that_bring_something_are_named() -> None:
    def body(comm: Communicator) -> None:
        x = np.zeros(200_000)
        x[-1 - comm.rank] = [np.inf, -np.inf, 0, np.nan][comm.rank]
        comm.all_reduce(x, async_op=True).wait()

    assert told(body, 4, NotFinite, "finite").startswith(
        "rank 0 brings inf at [199999], rank 1 brings -inf at [199998], rank 3 brings nan at "
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_a_reduction_makes_is_looked_at(size: int) -> None:
    def body(comm: Communicator) -> None:
        with np.errstate(over="ignore"):
            x = np.full((2, 2), 1.0)
            x[1, 1] = 1e308
            comm.reduce(np.concatenate([x] * 4), "prod" if size == 1 else "sum", root=comm.size - 1)
            if comm.size == 1:
                comm.all_reduce(np.array([np.inf]))

    said = told(body, size, NotFinite, "finite")
    if size > 1:
        assert said.startswith(f"rank {size - 1} gets inf at [1, 1] from reduce (call 1, from ")


def test_what_is_remembered_is_looked_at_every_time() -> None:
    def body(comm: Communicator) -> None:
        x = np.ones(4)
        for _ in range(3):
            comm.all_reduce(x)
        x[comm.rank] = np.nan
        comm.all_reduce(x)

    assert "rank 1 brings nan at [1]" in told(body, 3, NotFinite, "finite")


def test_device_arrays_are_looked_at() -> None:
    def body(comm: Communicator) -> None:
        x = np.ones(4)
        assert on_host(comm.all_reduce(on_device(x)))[0] == comm.size
        x[2] = np.nan if comm.rank else 1
        comm.all_reduce(on_device(x))

    assert told(body, 2, NotFinite, "finite").startswith("rank 1 brings nan at [2] to all_reduce")


def test_what_is_not_finite_passes_where_calls_alone_are_checked() -> None:
    def body(comm: Communicator) -> None:
        assert np.isnan(comm.all_reduce(np.array([np.nan])))[0]

    checked(body, 2)
    with pytest.raises(NotFinite):  # the control
        checked(body, 2, "finite")


# Switching it on


@pytest.mark.parametrize(
    ("variable", "check", "wanted"),
    [
        (None, None, False),
        ("", None, False),
        ("0", None, False),
        ("1", None, True),
        ("finite", None, "finite"),
        ("1", False, False),
        ("0", True, True),
        ("1", "finite", "finite"),
    ],
)
def test_the_variable_counts_where_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, check: Any, wanted: Any
) -> None:
    monkeypatch.delenv("COLLECTIVES_CHECK", raising=False)
    if variable is not None:
        monkeypatch.setenv("COLLECTIVES_CHECK", variable)
    assert checked(lambda comm: comm.check, 2, check) == [wanted] * 2


def test_anything_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (1, "calls", "yes", 0, [], "1"):
        with pytest.raises(ValueError, match="check must be True, False, None or 'finite', not"):
            checked(lambda comm: None, 1, wrong)
    monkeypatch.setenv("COLLECTIVES_CHECK", "yes")
    with pytest.raises(ValueError, match="COLLECTIVES_CHECK must be 0, 1 or finite, not 'yes'"):
        checked(lambda comm: None, 1, None)


def test_without_checking_nothing_is_exchanged() -> None:
    def body(comm: Communicator) -> list[str]:
        with comm.record() as ledger:
            comm.all_reduce(np.ones(1))
            comm.plan.all_reduce(np.ones(1)).run()
        return [row.collective for row in ledger.rows()]

    assert collectives.run(body, 2, check=False) == [["all_reduce"] * 2] * 2
