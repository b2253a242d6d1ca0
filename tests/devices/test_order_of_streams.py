"""Random programs on several streams: the order of calls on devices does not depend on luck.

The streams of all ranks are held while the ranks enqueue their programs, so the host sees nothing
that is complete.  Then the fake GPU objects to every two operations that use the same memory
without an order of streams, events and counters between them (`tests/fakes/races.py`).
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import CollectiveError, Communicator
from collectives.devices import enqueue, loop, order, placed, rows
from collectives.devices.driver import FUNCTIONS, DriverError
from collectives.devices.messages import boxes
from collectives.engines import Box
from collectives.lowering import Counter, DeviceKind, DeviceProgram
from tests.devices.kernels_of_threads import run_as_kernels
from tests.devices.threads_with_counters import use_counters
from tests.fakes.device import BACKEND, FakeDeviceArray, FakeStream, on_device, on_host
from tests.fakes.driver import gpu
from tests.fakes.held_stream import hold, released

pytestmark = pytest.mark.usefixtures("new_gpu")
LENGTH = 12  # of arrays; 2, 3 and 4 ranks divide it

# By what the streams of ranks are in order with each other.  Ranks that are threads use events;
# the second kind is what ranks of different processes use, and the third if they run at one time.
KINDS = "events", "counters", "kernels"
MESSAGES = "events", "counters"  # which no kernel runs


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "counters":
        use_counters(monkeypatch)
    elif request.param == "kernels":
        run_as_kernels(monkeypatch)
    return request.param


# Programs


class Arrays:
    """An input and an output, which one stream after another uses."""

    def __init__(self) -> None:
        self.x, self.y = (on_device(np.zeros(LENGTH)) for _ in range(2))
        self.last_use = BACKEND.record()


def all_reduce(algorithm: str) -> Any:
    return lambda comm, a: partial(comm.all_reduce, a.x, out=a.y, algorithm=algorithm)


CALLS: dict[str, Callable[[Communicator, Arrays], Callable[..., Any]]] = {
    "ring": all_reduce("ring"),
    "one_shot": all_reduce("one_shot"),
    "with scratch": all_reduce("all_gather_reduce"),
    "in place": lambda comm, a: partial(comm.all_reduce, a.x, out=a.x),
    "broadcast": lambda comm, a: partial(comm.broadcast, a.x, out=a.y, root=1),
    "all_to_all": lambda comm, a: partial(comm.all_to_all, a.x, out=a.y),
    "scan": lambda comm, a: partial(comm.scan, a.x, out=a.y),
    "send_recv": lambda comm, a: partial(
        comm.send_recv, a.x, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, out=a.y
    ),
}


def expected(name: str, size: int, rank: int, turn: int) -> list[float]:
    """The result if rank r has 10 r + turn in all its elements."""
    inputs = [10.0 * r + turn for r in range(size)]
    if name == "broadcast":
        return [inputs[1]] * LENGTH
    if name == "send_recv":
        return [inputs[rank - 1]] * LENGTH
    if name == "all_to_all":
        return [value for value in inputs for _ in range(LENGTH // size)]
    return [sum(inputs[: rank + 1] if name == "scan" else inputs)] * LENGTH


class Rank:
    """One rank's part in a random program: its arrays, its streams, and its plans."""

    def __init__(self, comm: Communicator, seed: int) -> None:
        self.comm, self.rng = comm, random.Random(f"{seed} {comm.rank}")
        self.arrays = [Arrays() for _ in range(3)]
        self.streams = [FakeStream(f"{k} of rank {comm.rank}") for k in range(3)]
        self.plans = [comm.plan.all_reduce(a.x, out=a.y, algorithm="ring") for a in self.arrays]

    def run(self, turn: int, name: str, at: int) -> tuple[FakeDeviceArray, list[float]]:
        """Make a call on some stream; return the result and what is expected."""
        arrays = self.arrays[at]
        with BACKEND.on_stream(self.rng.choice(self.streams)):
            arrays.last_use.join()
            value = 10.0 * self.comm.rank + turn
            BACKEND.copy(on_device(np.full(LENGTH, value)), arrays.x)
            if self.rng.random() < 0.5:
                self.call(name, at)()
                return self.result(name, arrays, turn)
            work = self.start(name, at)
        with BACKEND.on_stream(self.rng.choice(self.streams)):
            work.wait()
            return self.result(name, arrays, turn)

    def call(self, name: str, at: int) -> Callable[..., Any]:
        return self.plans[at].run if name == "plan" else CALLS[name](self.comm, self.arrays[at])

    def start(self, name: str, at: int) -> Any:
        if name != "plan":
            return self.call(name, at)(async_op=True)
        self.plans[at].start()
        return self.plans[at]

    def result(self, name: str, arrays: Arrays, turn: int) -> tuple[FakeDeviceArray, list[float]]:
        y = BACKEND.empty((LENGTH,), np.dtype(float))
        BACKEND.copy(arrays.x if name == "in place" else arrays.y, y)
        BACKEND.copy(on_device(np.full(LENGTH, -1.0)), arrays.x)
        BACKEND.copy(arrays.x, arrays.y)
        arrays.last_use = BACKEND.record()
        return y, expected(name, self.comm.size, self.comm.rank, turn)


def run_programs(
    seed: int,
    num_turns: int = 12,
    names: Sequence[str] = (*CALLS, "plan"),
    *,
    is_held: bool = True,
    seconds: float = 60,
) -> None:
    """Let 2, 3 or 4 ranks make the same calls, each on streams of its own choice."""
    size = 2 + seed % 3
    gpu().reset(seed, queue_length=4000 if is_held else 12 + seed)
    with ExitStack() as stack:
        word = stack.enter_context(released())

        def body(comm: Communicator) -> None:
            rank, rng = Rank(comm, seed), random.Random(seed)
            for name in names:  # loads kernels, and agrees on links
                rank.run(0, name, 0)
                comm.synchronize()
            comm.barrier()
            for stream in rank.streams if is_held else ():
                hold(stream, word)
            turns = [(turn, rng.choice(names), rng.randrange(3)) for turn in range(num_turns)]
            results = [rank.run(*turn) for turn in turns]
            assert not is_held or not word[0]
            comm.barrier()
            word[:] = 1
            comm.synchronize()
            for stream in rank.streams:
                stream.synchronize()
            for (_, name, _), (found, wanted) in zip(turns, results, strict=True):
                assert on_host(found).tolist() == wanted, name
            for plan in rank.plans:
                plan.free()

        collectives.run(body, size, timeout=seconds)
    gpu().check()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_every_two_uses_of_memory_are_in_order(seed: int, kind: str) -> None:
    run_programs(seed, 20)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_every_two_uses_of_memory_are_in_order_if_queues_are_full(seed: int, kind: str) -> None:
    run_programs(seed, is_held=False)


# What is noticed


def is_noticed(monkeypatch: pytest.MonkeyPatch, *names: str) -> bool:
    """Whether the fake GPU objects to one of some programs with these calls, or with any."""
    monkeypatch.setattr(gpu(), "limit", 3.0)
    for seed in (2, 5, 8):  # of four ranks
        found = ""
        try:
            run_programs(seed, 20, names or (*CALLS, "plan"), seconds=6)
        except (AssertionError, DriverError, CollectiveError) as error:
            # Perhaps of a wrong result, or of streams that wait for ever, which come of that.
            found = "\n".join([str(error), *gpu().violations])
            gpu().violations.clear()
        if "nothing orders" in found or "in no order" in found:
            return True
    return False


class Events:
    """The events of the starts and of the ends of runs, and the streams of communicators.

    `ignored`: "starts"; or "ends", for which the communicators' streams do not wait; or "ends for
    callers", for which the callers' streams do not wait.
    """

    def __init__(self) -> None:
        self.starts, self.ends, self.streams = set[int](), set[int](), set[int]()
        self.ignored, self.function = "", object()

    def note(self, run: loop.Loop) -> None:
        self.starts.add(int(run.words[enqueue.STARTED]))
        self.ends.add(run.order.stream.event)
        self.streams.add(run.order.stream.handle)

    def is_ignored(self, stream: int, event: int) -> bool:
        if self.ignored == "starts":
            return event in self.starts
        is_own = stream in self.streams
        return event in self.ends and self.ignored == ("ends" if is_own else "ends for callers")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    noted, init, name = Events(), loop.Loop.__init__, "cuStreamWaitEvent"
    function = ctypes.CFUNCTYPE(ctypes.c_int, *FUNCTIONS[name])
    wait = function(gpu().driver.addresses[name])

    def with_noted_events(self: loop.Loop, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        noted.note(self)

    @function
    def filtered(stream: int, event: int, flags: int) -> int:
        return 0 if noted.is_ignored(stream, event) else wait(stream, event, flags)

    monkeypatch.setattr(loop.Loop, "__init__", with_noted_events)
    address = ctypes.cast(filtered, ctypes.c_void_p).value
    monkeypatch.setitem(gpu().driver.addresses, name, address)
    noted.function = filtered  # which must not end before the test
    return noted


@pytest.mark.slow
def test_runs_whose_events_are_noted_are_in_order(kind: str, events: Events) -> None:
    """It is not the fixture that is noticed."""
    run_programs(1)


@pytest.mark.parametrize("ignored", ["starts", "ends", "ends for callers"])
@pytest.mark.slow
def test_a_run_that_does_not_wait_for_an_event_is_noticed(
    ignored: str, kind: str, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.ignored = ignored
    assert is_noticed(monkeypatch, "with scratch")  # which calls of a kind have in common


@pytest.mark.slow
def test_a_stream_that_does_not_wait_for_an_asynchronous_call_is_noticed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order.Enqueued, "join", lambda _: None)
    assert is_noticed(monkeypatch)


def test_ranks_that_do_not_wait_for_events_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def await_on_host(*_: object) -> Iterator[None]:
        yield from ()

    monkeypatch.setattr(rows.HostRows, "await_word", await_on_host)
    assert is_noticed(monkeypatch)


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.slow
def test_ranks_that_do_not_wait_for_counters_are_noticed(
    is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_counters(monkeypatch)
    right = placed.table_of

    def without_awaits(program: DeviceProgram, *others: Any) -> Any:
        def is_kept(counter: Counter | None, kind: DeviceKind) -> bool:
            return kind != DeviceKind.AWAIT or counter is None or counter.is_read != is_read

        operations = [x for x in program.operations if is_kept(x.counter, x.kind)]
        return right(DeviceProgram(tuple(operations)), *others)

    monkeypatch.setattr(placed, "table_of", without_awaits)
    assert is_noticed(monkeypatch)


@pytest.mark.parametrize("kind", MESSAGES, indirect=True)
@pytest.mark.slow
def test_a_message_that_is_read_before_it_is_ready_is_noticed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = boxes.Boxes.take_out

    def at_once(self: boxes.Boxes, envelope: Any, sender: int, copy: Any, stream: int) -> None:
        copy()
        right(self, envelope, sender, lambda: None, stream)

    monkeypatch.setattr(boxes, "AHEAD", 64)  # to allocate more, a rank would wait for its streams
    monkeypatch.setattr(boxes.Boxes, "take_out", at_once)
    assert is_noticed(monkeypatch, "ring", "send_recv")


@pytest.mark.parametrize("kind", MESSAGES, indirect=True)
@pytest.mark.slow
def test_memory_of_messages_that_is_used_again_too_early_is_noticed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boxes, "AHEAD", 64)
    monkeypatch.setattr(Box, "is_free", True)
    monkeypatch.setattr(boxes.Memory, "is_read", lambda *_: True)
    assert is_noticed(monkeypatch, "ring", "send_recv")
