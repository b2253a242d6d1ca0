"""The device of any rank stands still after any operation, in random programs on several streams.

The ranks are threads whose streams await counters, as those of ranks of different processes do.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from collectives import CollectiveError, Communicator
from collectives.devices.watched import Watched, WatchedKernel, WatchedRows
from collectives.engines import Board, deadline_in, poll_until
from tests.devices.kernels_of_threads import run_as_kernels
from tests.devices.threads_with_counters import use_counters
from tests.fakes.device import BACKEND, FakeStream, on_device
from tests.fakes.driver import gpu
from tests.fakes.interpreter import KernelRun
from tests.inside import session_of, watch_of

pytestmark = pytest.mark.usefixtures("new_gpu", "counters")
LENGTH, NUM_CALLS = 12, 4
NAMES = "ring", "one_shot", "two_shot", "all_gather_reduce", "recursive_doubling", "circulant"
SECONDS = 0.1  # the time limit of a device


@pytest.fixture(params=["rows", "kernels"])
def counters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "kernels":
        run_as_kernels(monkeypatch)
    else:
        use_counters(monkeypatch)


@pytest.fixture(autouse=True)
def releases(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each release of a device, whether the failure was known to all ranks before it."""
    known = list[bool]()

    def note(kind: type[Watched]) -> None:
        let_go = kind.let_go

        def noted(self: Watched) -> None:
            known.append(self.meeting.board.failure is not None)
            gpu().races.is_paused = True  # what devices compute is void from now on
            let_go(self)

        monkeypatch.setattr(kind, "let_go", noted)

    note(WatchedRows)
    note(WatchedKernel)
    return known


class Outcome(NamedTuple):
    """What a rank has seen: whether it has failed, and whether it takes wrong results for right."""

    has_failed: bool
    is_wrong: bool = False


class Together:
    """What the ranks of a test know of each other, without a communicator that may fail."""

    def __init__(self, size: int) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.barrier = threading.Barrier(size, timeout=30)


def calls(comm: Communicator, seed: int, streams: list[FakeStream]) -> list[tuple[Any, Any]]:
    """Make some calls on streams of this rank's choice; return the input and output of each."""
    rng, results = random.Random(seed), []
    for name in rng.sample(NAMES, NUM_CALLS):
        x = on_device(np.full(LENGTH, comm.rank + 1.0))
        with BACKEND.on_stream(random.choice(streams)):
            if random.random() < 0.5:
                y = comm.all_reduce(x, algorithm=name)
            else:
                y = comm.all_reduce(x, algorithm=name, async_op=True).wait()
        results.append((x, y))
    return results


CheckEnd = Callable[[Communicator, list[FakeStream]], object]


def rank_of_program(comm: Communicator, seed: int, together: Together, check_end: CheckEnd) -> None:
    """Make calls; the device of one rank stands still meanwhile, until all others have ended."""
    rng = random.Random(seed)
    slow, after = rng.randrange(comm.size), rng.randrange(60)
    streams = [FakeStream(f"{k} of rank {comm.rank}") for k in range(2)]
    first = calls(comm, seed, streams)  # loads kernels, and agrees on links
    comm.synchronize()
    together.barrier.wait()
    del first  # peers that have not enqueued a call would find its arrays gone
    if comm.rank == slow:
        own = session_of(comm).devices._order.stream.handle
        gpu().standing, gpu().num_left = {own, *(stream.ptr for stream in streams)}, after
        threading.Thread(target=go_on_after_the_others, args=(comm.size, together)).start()
    together.barrier.wait()
    together.outcomes[comm.rank] = outcome_of(
        comm, lambda: calls(comm, seed, streams), None if comm.rank == slow else SECONDS
    )
    together.barrier.wait()
    if any(each.has_failed for each in together.outcomes.values()):
        check_end(comm, streams)


def go_on_after_the_others(size: int, together: Together) -> None:
    poll_until(lambda: len(together.outcomes) >= size - 1, deadline_in(20))
    gpu().num_left = math.inf


def outcome_of(
    comm: Communicator, make_calls: Callable[[], list[tuple[Any, Any]]], timeout: float | None
) -> Outcome:
    """Wait for the device; look at what it has computed if no failure is known."""
    try:
        results = make_calls()
        comm.synchronize(timeout)
    except CollectiveError:
        return Outcome(has_failed=True)
    wanted = [comm.size * (comm.size + 1) / 2] * LENGTH
    return Outcome(has_failed=False, is_wrong=any(y.memory.tolist() != wanted for _, y in results))


def is_refused(comm: Communicator, streams: list[FakeStream]) -> None:
    """No later call reports success, and nothing stays on a stream."""
    for call in (lambda: comm.all_reduce(on_device(np.ones(3))), comm.synchronize, comm.barrier):
        with pytest.raises(CollectiveError):
            call()
    watch = watch_of(comm)
    assert poll_until(lambda: not watch.is_busy, deadline_in(20))
    for stream in streams:
        stream.synchronize()


def outcomes(seed: int, check_end: CheckEnd = is_refused) -> list[Outcome]:
    """What the ranks of a program have seen; `check_end` is called on each after a failure."""
    size = 2 + seed % 3
    gpu().reset(seed, queue_length=400)
    together = Together(size)
    collectives.run(
        partial(rank_of_program, seed=seed, together=together, check_end=check_end),
        size,
        timeout=40,
    )
    gpu().races.is_paused = False
    return [*together.outcomes.values()]


@pytest.mark.parametrize("first", range(0, 48, 12))
@pytest.mark.slow
def test_no_rank_takes_void_results_for_right(first: int, releases: list[bool]) -> None:
    found = [outcome for seed in range(first, first + 12) for outcome in outcomes(seed)]
    assert not any(outcome.is_wrong for outcome in found)
    assert any(outcome.has_failed for outcome in found)
    assert releases
    assert all(releases)


@pytest.mark.slow
def test_a_rank_that_does_not_let_the_others_know_is_noticed(
    monkeypatch: pytest.MonkeyPatch, releases: list[bool]
) -> None:
    """The negative control: its device goes on with void data, which others take for right.

    A kernel would leave, and raise no counter after that.
    """
    monkeypatch.setattr(KernelRun, "leaves", False)
    monkeypatch.setattr(Board, "note_failure", lambda *_: None)
    found = [outcome for seed in range(24) for outcome in outcomes(seed, lambda *_: None)]
    assert any(outcome.is_wrong for outcome in found)
    assert not all(releases)
