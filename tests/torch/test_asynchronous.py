"""Calls in progress: works and futures, what follows them, and time limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import DistBackendError

from tests.torch.tensors import Tensor, all_drawn, blank, blanks, check, check_all, combined, drawn

pytestmark = pytest.mark.mpi


class Call(NamedTuple):
    """A call of this rank, the tensors that it fills, and what they must hold afterwards."""

    name: str
    start: Callable[..., Any]
    outputs: list[Tensor]
    wanted: list[Tensor]


def every_call(ranks: range) -> Iterator[Call]:
    """A call of every collective; where there is a root, it is the last rank."""
    mine, root, everyones = dist.get_rank(), ranks[-1], all_drawn((len(ranks), 2))
    brought, total, whole = everyones[mine], combined("SUM", everyones), torch.cat(everyones)
    to_all, to_me = list(brought), [tensor[mine] for tensor in everyones]

    def call(
        name: str, arguments: Callable[..., tuple[Any, ...]], wanted: list[Tensor], **more: Any
    ) -> Call:
        """A call of `dist.name`, whose arguments are made with the tensors to fill."""
        outputs = blanks(wanted)
        start = partial(getattr(dist, name), *arguments(outputs), **more)
        return Call(name, start, outputs, wanted)

    def replaced(outputs: list[Tensor]) -> tuple[Tensor]:
        return (outputs[0].copy_(brought),)

    yield call("all_reduce", replaced, [total])
    yield call("broadcast", replaced, [everyones[root]], src=root)
    if mine == root:
        yield call("reduce", replaced, [total], dst=root)
        yield call("gather", lambda outputs: (brought, outputs), everyones, dst=root)
        yield call("scatter", lambda outputs: (outputs[0], everyones), [brought], src=root)
    else:
        yield Call("reduce", partial(dist.reduce, brought.clone(), root), [], [])
        yield Call("gather", partial(dist.gather, brought, dst=root), [], [])
        yield call("scatter", lambda outputs: (outputs[0],), [brought], src=root)
    yield call("all_gather", lambda outputs: (outputs, brought), everyones)
    yield call("all_gather_into_tensor", lambda outputs: (outputs[0], brought), [whole])
    yield call("reduce_scatter", lambda outputs: (outputs[0], to_all), [total[mine]])
    yield call("reduce_scatter_tensor", lambda outputs: (outputs[0], brought), [total[mine]])
    yield call("all_to_all", lambda outputs: (outputs, to_all), to_me)
    yield call("all_to_all_single", lambda outputs: (outputs[0], brought), [torch.stack(to_me)])
    yield Call("barrier", dist.barrier, [], [])


def check_call(call: Call) -> None:
    check_all(call.outputs, call.wanted)


def until(is_so: Callable[[], bool]) -> None:
    """Sleep until something is so, without a call that could make progress."""
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline, "it was not so within 10 s"
        time.sleep(1e-3)


# Works and futures


def test_wait_returns_when_the_result_is_there(ranks: range) -> None:
    for call in every_call(ranks):
        assert call.start(async_op=True).wait()
        check_call(call)


def test_calls_under_way_at_once_may_be_waited_for_in_any_order(ranks: range) -> None:
    calls = list(every_call(ranks))
    works = [call.start(async_op=True) for call in calls]
    for work in works if dist.get_rank() % 2 else reversed(works):
        work.wait()
    for call in calls:
        check_call(call)


def test_a_work_has_the_result(ranks: range) -> None:
    for call in every_call(ranks):
        outputs = call.start(async_op=True).result()
        if call.outputs:
            check_all(outputs, call.wanted)


def test_a_work_is_complete_in_time_without_a_wait(ranks: range) -> None:
    for call in every_call(ranks):
        work = call.start(async_op=True)
        until(work.is_completed)
        check_call(call)


def test_a_future_is_done_in_time_without_a_wait(ranks: range) -> None:
    for call in every_call(ranks):
        future = call.start(async_op=True).get_future()
        until(future.done)
        check_call(call)


def test_the_value_of_a_future_is_the_result(ranks: range) -> None:
    for call in every_call(ranks):
        value = call.start(async_op=True).get_future().wait()
        if call.outputs:
            check_all(value, call.wanted)


def test_what_follows_a_future_sees_the_result(ranks: range) -> None:
    for call in every_call(ranks):
        future = call.start(async_op=True).get_future()

        def doubled(done: Any, call: Call = call) -> list[Tensor]:
            check_call(call)
            return [2 * tensor for tensor in (done.value() if call.outputs else [])]

        check_all(future.then(doubled).wait(), [2 * tensor for tensor in call.wanted])


def test_what_follows_a_future_can_make_a_call_and_wait_for_it(ranks: range) -> None:
    everyones = all_drawn()

    def summed_again(done: Any) -> Tensor:
        (tensor,) = done.value()
        dist.all_reduce(tensor, async_op=True).wait()
        return tensor

    future = dist.all_reduce(everyones[dist.get_rank()].clone(), async_op=True).get_future()
    check(future.then(summed_again).wait(), combined("SUM", everyones) * len(ranks))


def test_what_follows_a_future_can_make_a_call_that_blocks(ranks: range) -> None:
    everyones = all_drawn()

    def summed_again(done: Any) -> Tensor:
        (tensor,) = done.value()
        dist.all_reduce(tensor)
        return tensor

    future = dist.all_reduce(everyones[dist.get_rank()].clone(), async_op=True).get_future()
    check(future.then(summed_again).wait(), combined("SUM", everyones) * len(ranks))


def test_what_fails_after_a_future_is_raised_by_whoever_waits(ranks: range) -> None:
    def fail(_: Any) -> None:
        raise ArithmeticError("on purpose")

    future = dist.all_reduce(drawn(0), async_op=True).get_future()
    with pytest.raises(Exception, match="on purpose"):
        future.then(fail).wait()


def test_tensors_that_are_not_contiguous_are_filled_before_anyone_learns_of_it(
    ranks: range,
) -> None:
    everyones = all_drawn((4, 3))
    wanted = combined("SUM", everyones)

    def started() -> tuple[Tensor, Any]:
        tensor = everyones[dist.get_rank()].t().contiguous().t()
        return tensor, dist.all_reduce(tensor, async_op=True)

    tensor, work = started()
    work.wait()
    check(tensor, wanted)
    tensor, work = started()
    until(work.is_completed)
    check(tensor, wanted)
    tensor, work = started()
    check(work.get_future().then(lambda done: done.value()[0].clone()).wait(), wanted)


def test_ranks_may_differ_in_whether_they_wait(ranks: range) -> None:
    for turn in range(2):
        for i, call in enumerate(every_call(ranks)):
            work = call.start(async_op=(dist.get_rank() + i + turn) % 2 == 0)
            if work is not None:
                work.wait()
            check_call(call)


def test_a_call_that_not_all_ranks_have_made_is_not_complete(ranks: range) -> None:
    """Negative control: works and futures do not always say that they are done."""
    late = dist.get_rank() == ranks[-1]
    work = None if late else dist.barrier(async_op=True)
    if work is not None:
        time.sleep(0.05)
        assert not work.is_completed() and not work.get_future().done()
    store = dist.distributed_c10d._get_default_store()
    if late:
        store.wait([f"looked {rank}" for rank in ranks[:-1]], timedelta(seconds=20))
        dist.barrier()
    else:
        store.set(f"looked {dist.get_rank()}", "yes")
        work.wait()


# Time limits: the last rank comes when the others have waited in vain.  A future that fails ends
# its call, which can leave messages: `tests/test_torch_jobs.py` tests it in a job of its own.


@pytest.fixture
def short(ranks: range) -> dist.ProcessGroup:
    """A group of all ranks with a time limit of half a second."""
    dist.new_group([*ranks])  # the first one takes PyTorch some time
    return dist.new_group([*ranks], timeout=timedelta(seconds=0.5))


def is_late(ranks: range) -> bool:
    return dist.get_rank() == ranks[-1]


def raised_in_time(
    mpi_world: MPI.Intracomm, ranks: range, wait: Callable[[], object]
) -> RuntimeError | None:
    """What a wait of all ranks but the last raises; all of them return when it has.

    A rank that is waited for may itself wait for another one: one of them names the last one.
    """
    error, start = None, time.monotonic()
    try:
        if not is_late(ranks):
            with pytest.raises(RuntimeError, match="waited") as caught:
                wait()
            error = caught.value
            assert 0.1 < time.monotonic() - start < 5
    finally:
        said = mpi_world.allgather("" if error is None else str(error).splitlines()[0])
    assert any(f"from rank {ranks[-1]}" in sentence for sentence in said), said
    return error


def test_a_wait_with_a_time_limit_ends_and_can_be_repeated(
    mpi_world: MPI.Intracomm, ranks: range
) -> None:
    tensor = drawn(dist.get_rank())
    work = None if is_late(ranks) else dist.all_reduce(tensor, async_op=True)
    raised_in_time(mpi_world, ranks, lambda: work.wait(timedelta(seconds=0.3)))
    if work is None:
        dist.all_reduce(tensor)
    else:
        work.wait()
    check(tensor, combined("SUM", all_drawn()))


@pytest.mark.parametrize("wait", ["wait", "result"])
def test_a_wait_ends_at_the_time_limit_of_the_group(
    mpi_world: MPI.Intracomm, ranks: range, short: dist.ProcessGroup, wait: str
) -> None:
    tensor = drawn(dist.get_rank())
    work = None if is_late(ranks) else dist.all_reduce(tensor, group=short, async_op=True)
    raised_in_time(mpi_world, ranks, lambda: getattr(work, wait)())
    if work is None:
        dist.all_reduce(tensor, group=short)
    else:
        work.wait()
    check(tensor, combined("SUM", all_drawn()))


def test_a_blocking_call_ends_at_the_time_limit_of_the_group(
    mpi_world: MPI.Intracomm, ranks: range, short: dist.ProcessGroup
) -> None:
    tensor = drawn(dist.get_rank())
    error = raised_in_time(mpi_world, ranks, lambda: dist.all_reduce(tensor, group=short))
    if error is None:
        dist.all_reduce(tensor, group=short)
    else:
        assert isinstance(error, DistBackendError)
        error.__cause__.work.wait()
    check(tensor, combined("SUM", all_drawn()))


def test_a_receive_ends_at_the_time_limit_of_the_group(
    mpi_world: MPI.Intracomm, ranks: range, short: dist.ProcessGroup
) -> None:
    tensor = blank(drawn(0))
    error = raised_in_time(mpi_world, ranks, lambda: dist.recv(tensor, ranks[-1], group=short))
    if error is not None:
        error.__cause__.work.wait()
        check(tensor, drawn(0))
    else:
        for rank in ranks[:-1]:
            dist.send(drawn(0), rank, group=short)


def test_a_receive_from_any_rank_ends_at_the_time_limit_of_the_group(
    mpi_world: MPI.Intracomm, ranks: range, short: dist.ProcessGroup
) -> None:
    if not is_late(ranks):
        with pytest.raises(DistBackendError, match="for a message with tag 0 from any rank"):
            dist.recv(blank(drawn(0)), group=short)
    mpi_world.Barrier()


def test_a_call_that_all_ranks_make_in_time_does_not_fail(
    ranks: range, short: dist.ProcessGroup
) -> None:
    """Negative control: the limit is that of a wait, not of the group."""
    for _ in range(2):
        future = dist.barrier(group=short, async_op=True).get_future()
        time.sleep(0.6)
        future.wait()
        dist.barrier(group=short)
