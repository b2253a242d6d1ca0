"""Sends and receives of which an end is on a device: in order, and without the host waiting."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives.devices import ENVELOPE, shadow
from collectives.devices.messages.boxes import Boxes
from collectives.engines import NUM_BOXES
from tests.fakes.device import (
    BACKEND,
    FakeDeviceArray,
    FakeStream,
    contents,
    fill,
    on_device,
    on_host,
)
from tests.fakes.driver import gpu
from tests.fakes.held_stream import hold
from tests.inside import session_of, transport_of
from tests.switching import switching_every

pytestmark = pytest.mark.usefixtures("new_gpu")

SIZES = (0, 1, 5, ENVELOPE.itemsize // 8, 40)


def run(body: Callable[[Communicator], Any], size: int = 2, **options: Any) -> list[Any]:
    """Run a function on ranks that know which memory they can read."""

    def with_links(comm: Communicator) -> Any:
        comm.all_reduce(on_device(np.ones(2)))
        comm.synchronize()
        comm.barrier()
        return body(comm)

    return collectives.run(with_links, size, timeout=60, **options)


def boxes_of(comm: Communicator) -> Boxes:
    route = session_of(comm).devices.mail.route
    assert route is not None
    return route.boxes


def are_empty(boxes: Boxes) -> bool:
    return boxes.has_free() and not boxes.memory.full


def links_of(comm: Communicator, call: Callable[[], object]) -> list[tuple[str, str, int]]:
    """What a call sends: collective, link and bytes of its messages."""
    with comm.record() as ledger:
        call()
    comm.synchronize()
    return [(row.collective, row.link, row.bytes) for row in ledger.rows()]


# In the order of streams


@pytest.mark.parametrize("kind", ["call", "plan"])
def test_sends_and_receives_return_before_the_device_has_begun(kind: str, word: np.ndarray) -> None:
    """The array may be changed, and the received one be used, in the order of the stream."""
    gpu().reset(queue_length=400)

    def body(comm: Communicator) -> None:
        x, y, me = on_device(np.ones(6)), on_device(np.zeros(6)), comm.rank
        around = {"dest": 1 - me, "source": 1 - me}
        plan = comm.plan.send_recv(x, **around, out=y)
        call = plan.run if kind == "plan" else partial(comm.send_recv, x, **around, out=y)
        call()  # the first one allocates memory
        comm.synchronize()
        comm.barrier()
        hold(BACKEND.current_stream(), word)
        results = []
        for turn in range(5):
            fill(x, turn + 10.0 * me)
            call()
            results.append(contents(y))
            fill(y, -1.0)
        assert word[0] == 0
        comm.barrier()
        word[:] = 1
        for turn, result in enumerate(results):
            assert on_host(result).tolist() == [turn + 10.0 * (1 - me)] * 6
        comm.synchronize()
        plan.free()

    run(body)
    assert BACKEND.bytes_to_host == 0


def test_wait_lets_the_current_stream_wait_for_a_message(word: np.ndarray) -> None:
    wait_on_another_stream(word)


def wait_on_another_stream(word: np.ndarray) -> None:
    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.zeros(6))
        comm.send(x, 1) if comm.rank == 0 else comm.recv(y, 0)
        comm.synchronize()
        comm.barrier()
        hold(BACKEND.current_stream(), word)
        fill(x, 7.0)
        fill(y, -1.0)
        start: Any = comm.send if comm.rank == 0 else comm.recv
        work = start(x if comm.rank == 0 else y, 1 - comm.rank, async_op=True)
        with BACKEND.on_stream(FakeStream(f"another of rank {comm.rank}")):
            work.wait()
            result = contents(y)
            assert not work.test()
            comm.barrier()
            word[:] = 1
            assert comm.rank == 0 or on_host(result).tolist() == [7.0] * 6
        work.wait(host=True)
        assert work.test()

    run(body)


def test_a_box_that_is_read_before_it_is_filled_is_noticed(
    monkeypatch: pytest.MonkeyPatch, word: np.ndarray
) -> None:
    """The negative control of the test above."""
    right = Boxes.take_out

    def take_out_at_once(self: Any, envelope: Any, sender: int, copy: Any, stream: int) -> None:
        copy()
        right(self, envelope, sender, lambda: None, stream)

    monkeypatch.setattr(Boxes, "take_out", take_out_at_once)
    with suppress(AssertionError, collectives.CollectiveError):  # the result may be wrong
        wait_on_another_stream(word)
    assert "nothing orders a copy" in gpu().violations[0]
    gpu().violations.clear()


def test_an_asynchronous_send_holds_its_array_until_it_is_done(word: np.ndarray) -> None:
    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(6)), on_device(np.ones(6))
        comm.send_recv(x, 1 - comm.rank, 1 - comm.rank, out=y)
        comm.synchronize()
        comm.barrier()
        hold(BACKEND.current_stream(), word)
        comm.send(x, 1 - comm.rank, async_op=True).wait()
        still_there = weakref.ref(x.memory.base)
        del x
        assert still_there() is not None
        comm.recv(y, 1 - comm.rank)
        comm.barrier()
        word[:] = 1
        comm.synchronize()
        assert still_there() is None

    run(body)


def test_a_message_waits_for_no_other_message_on_another_stream(word: np.ndarray) -> None:
    """A device that waits for one rank receives from another one meanwhile."""

    def body(comm: Communicator) -> None:
        x, y, z = (on_device(np.full(4, float(comm.rank))) for _ in range(3))
        for _ in range(2):  # the first time, memory is allocated
            if comm.rank:
                if comm.rank == 1 and word_is_used:
                    hold(BACKEND.current_stream(), word)
                comm.send(x, 0)
            else:
                late = comm.recv(y, 1, async_op=True)
                late.wait() if not word_is_used else None
                comm.recv(z, 2, async_op=True).wait()
                assert on_host(z).tolist() == [2.0] * 4
                if word_is_used:
                    assert not late.test()
                    word[:] = 1
                    assert on_host(late.wait()).tolist() == [1.0] * 4
            comm.synchronize()
            comm.barrier()
            word_is_used.append(True)

    word_is_used: list[bool] = []
    run(body, 3)


# In the order of messages


@pytest.mark.parametrize("device", ["auto", "staged"])
@pytest.mark.parametrize("second", ["device", "host"])
def test_messages_with_a_tag_arrive_in_order_whatever_their_streams(
    device: Any, second: str, word: np.ndarray
) -> None:
    """Also if the array of the second one is ready before that of the first one."""

    def body(comm: Communicator) -> None:
        comm.send_recv(on_device(np.ones(3)), 1 - comm.rank, 1 - comm.rank)  # allocates memory
        comm.synchronize()
        comm.barrier()
        if comm.rank:
            found = [on_device(np.zeros(3)) for _ in range(2)]
            for y in found:
                comm.recv(y, 0)
            assert [on_host(y)[0] for y in found] == [1.0, 2.0]
            return
        with BACKEND.on_stream(FakeStream("the first")):
            hold(BACKEND.current_stream(), word)
            first = comm.send(on_device(np.full(3, 1.0)), 1, async_op=True)
        with BACKEND.on_stream(FakeStream("the second")):
            x = np.full(3, 2.0)
            work = comm.send(x if second == "host" else on_device(x), 1, async_op=True)
            for _ in range(20):
                work.test()
        word[:] = 1
        work.wait()
        first.wait()

    run(body, device=device)


# Of arrays of all kinds, and of all lengths


def array(kind: str, length: int, value: float) -> Any:
    x = np.full(length, value)
    return on_device(x) if kind == "device" else x


def values(x: Any) -> list[float]:
    return (on_host(x) if isinstance(x, FakeDeviceArray) else x).tolist()


@pytest.mark.parametrize("sender", ["device", "host"])
@pytest.mark.parametrize("receiver", ["device", "host"])
def test_each_kind_of_array_is_received_in_each_kind(sender: str, receiver: str) -> None:
    def body(comm: Communicator) -> None:
        for length in SIZES:
            for turn in range(3):
                if comm.rank == 0:
                    comm.send(array(sender, length, turn + 1.0), 1, turn)
                else:
                    y = array(receiver, length, -1.0)
                    assert comm.recv(y, 0, turn) is y
                    assert values(y) == [turn + 1.0] * length
        comm.synchronize()

    run(body)


@pytest.mark.parametrize("kind", ["device", "host"])
def test_a_message_of_another_length_is_refused(kind: str) -> None:
    """It is lost, and its box is free again."""

    def body(comm: Communicator) -> None:
        for length in (1, ENVELOPE.itemsize // 8, 39, 41):
            if comm.rank == 0:
                comm.send(array(kind, length, 1.0), 1)
            else:
                sentence = f"expected 320 bytes from rank 0 and got {8 * length}:"
                if kind == "host" and length == 41:
                    sentence = "expected"  # of the engine
                with pytest.raises(collectives.CollectiveMismatch, match=sentence):
                    comm.recv(on_device(np.zeros(40)), 0)
        comm.barrier()
        comm.synchronize()
        assert are_empty(boxes_of(comm))

    run(body)


def test_a_receive_that_was_posted_before_devices_were_used_gets_data() -> None:
    def body(comm: Communicator) -> None:
        y, x = np.zeros(30), np.full(30, 5.0)
        work = comm.recv(y, 0, async_op=True) if comm.rank else None
        comm.all_reduce(on_device(np.ones(2)))
        if work is None:
            assert links_of(comm, lambda: comm.send(on_device(x), 1)) == [("send", "staged", 240)]
        else:
            assert values(work.wait()) == [5.0] * 30
        comm.send_recv(on_device(x), 1 - comm.rank, 1 - comm.rank)
        comm.barrier()
        call = partial(comm.send_recv, on_device(x), 1 - comm.rank, 1 - comm.rank)
        assert links_of(comm, call)[0] == ("send_recv", "thread", 240)

    collectives.run(body, 2, timeout=60)


def test_a_plan_that_receives_on_the_host_gets_data_until_it_is_freed() -> None:
    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(30)), np.zeros(30)
        plan = comm.plan.recv(y, 0) if comm.rank else None
        comm.all_reduce(on_device(np.ones(2)))
        for is_freed in (False, True):
            comm.send_recv(x, 1 - comm.rank, 1 - comm.rank)
            comm.barrier()
            if comm.rank == 0:
                link = "thread" if is_freed else "staged"
                assert links_of(comm, lambda: comm.send(x, 1))[0] == ("send", link, 240)
            else:
                (comm.recv(y, 0) if plan is None else plan.run())
                assert values(y) == [1.0] * 30
            if plan is not None:
                plan.free()
                plan = None
            comm.barrier()

    collectives.run(body, 2, timeout=60)


# The ledger


def test_a_message_and_its_envelope_are_recorded() -> None:
    def body(comm: Communicator) -> None:
        x = on_device(np.ones(30))
        found = links_of(comm, lambda: comm.send_recv(x, 1 - comm.rank, 1 - comm.rank))
        envelope = ("envelope", "host", 144)
        assert found == [("send_recv", "thread", 240), envelope]

    run(body)


def test_a_part_of_a_communicator_knows_which_memory_can_be_read() -> None:
    def body(comm: Communicator) -> None:
        part = comm.split(int(comm.rank != 1))
        if part.size == 2:
            x, other = on_device(np.full(3, float(part.rank))), 1 - part.rank
            part.send_recv(x, other, other)
            part.barrier()
            assert links_of(part, lambda: part.send_recv(x, other, other))[0][1] == "thread"
            assert values(part.send_recv(x, other, other)) == [float(other)] * 3
        part.free()

    run(body, 3)


def test_a_rank_that_takes_no_envelopes_sends_some() -> None:
    def body(comm: Communicator) -> None:
        part, x, y = comm.split(0), np.ones(30), np.zeros(30)
        if comm.rank == 0:
            work = part.recv(y, 1, 5, async_op=True)
            comm.barrier()
            assert links_of(part, lambda: part.send(on_device(x), 1))[0][1] == "thread"
            assert values(work.wait()) == [1.0] * 30
        else:
            work = part.recv(on_device(y), 0, async_op=True)
            comm.barrier()
            assert values(work.wait()) == [1.0] * 30
            assert links_of(part, lambda: part.send(on_device(x), 0, 5))[0][1] == "staged"
        part.free()

    run(body)


# Boxes


def test_messages_for_which_no_box_is_free_are_staged() -> None:
    def body(comm: Communicator) -> None:
        num_messages = NUM_BOXES + 3
        if comm.rank == 0:
            arrays = [on_device(np.full(3, float(turn))) for turn in range(num_messages)]
            with comm.record() as ledger:
                works = [comm.send(x, 1, async_op=True) for x in arrays]
                comm.barrier()
                for work in works:
                    work.wait()
            links = [row.link for row in ledger.rows() if row.collective == "send"]
            assert links == ["thread"] * NUM_BOXES + ["staged"] * 3
        else:
            comm.barrier()
            for turn in range(num_messages):
                assert values(comm.recv(on_device(np.zeros(3)), 0)) == [float(turn)] * 3
        comm.synchronize()

    run(body)


def test_memory_of_messages_is_used_again() -> None:
    def body(comm: Communicator) -> int:
        x = on_device(np.ones(100))
        for _ in range(50):
            x = comm.send_recv(x, 1 - comm.rank, 1 - comm.rank)
            comm.synchronize()
            comm.barrier()
        return len(boxes_of(comm).memory.allocations)

    assert run(body) == [1, 1]


def test_a_communicator_is_freed_while_its_messages_are_not_read(word: np.ndarray) -> None:
    """Others get the memory of a message when it is read."""

    def body(comm: Communicator) -> None:
        part, x, idle = comm.split(0), on_device(np.full(6, 3.0)), shadow.IDLE[gpu().driver]
        for each in (comm, part):
            each.send_recv(x, 1 - comm.rank, 1 - comm.rank)
        part.send_recv(x, 1 - comm.rank, 1 - comm.rank)
        comm.synchronize()
        comm.barrier()
        if comm.rank == 0:
            (memory,) = boxes_of(part).memory.allocations
            part.send(x, 1)
            part.free()
            comm.send(x, 1)
            assert memory not in idle
            comm.barrier()
            comm.barrier()
            comm.send(x, 1)
            assert memory in idle
        else:
            hold(BACKEND.current_stream(), word)
            y, z = on_device(np.zeros(6)), on_device(np.zeros(6))
            part.recv(y, 0)
            comm.recv(z, 0)
            comm.barrier()
            word[:] = 1
            assert values(y) == [3.0] * 6
            comm.synchronize()
            comm.barrier()
            comm.recv(z, 0)
            part.free()

    run(body)


# What is refused, and what fails


def test_a_message_that_takes_too_long_goes_on_after_what_it_has_done(word: np.ndarray) -> None:
    """Its array may be changed on any stream that waits for it."""

    def body(comm: Communicator) -> None:
        x, y = on_device(np.full(6, 5.0)), on_device(np.zeros(6))
        comm.send_recv(x, 1 - comm.rank, 1 - comm.rank, out=y)
        comm.synchronize()
        comm.barrier()
        if comm.rank == 0:
            hold(BACKEND.current_stream(), word)
            with pytest.raises(collectives.CollectiveTimeout) as caught:
                comm.send_recv(x, 1, 1, out=y, timeout=0.05)
            comm.barrier()
            with BACKEND.on_stream(FakeStream("another")):
                caught.value.work.wait()
                fill(x, -1.0)
            word[:] = 1
        else:
            comm.barrier()
            comm.send_recv(x, 0, 0, out=y)
        assert values(y) == [5.0] * 6
        comm.synchronize()

    run(body)


def test_a_plan_of_a_message_can_be_used_after_a_start_that_was_refused() -> None:
    def body(comm: Communicator) -> None:
        plan = comm.plan.send_recv(on_device(np.ones(3)), 1 - comm.rank, 1 - comm.rank)
        with BACKEND.on_stream(FakeStream(f"captured by {comm.rank}")):
            stream = BACKEND.current_stream()
            gpu().capturing.add(stream.ptr)
            for start in (plan.run, plan.start):
                with pytest.raises(collectives.CollectiveError, match="is being captured"):
                    start()
            gpu().capturing.discard(stream.ptr)
        assert values(plan.run()) == [1.0] * 3
        plan.free()

    run(body)


def test_a_receive_that_has_failed_no_longer_keeps_envelopes_away() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank:
            comm.send(np.ones(2), 0)
        else:
            with pytest.raises(collectives.CollectiveMismatch):
                comm.recv(np.ones(3), 1)
        comm.all_reduce(on_device(np.ones(2)))
        comm.synchronize()
        call = partial(comm.send_recv, on_device(np.ones(3)), 1 - comm.rank, 1 - comm.rank)
        call()
        comm.barrier()
        assert links_of(comm, call)[0][1] == "thread"

    collectives.run(body, 2, timeout=60)


@pytest.mark.parametrize("has_come", [False, True])
def test_the_box_of_a_receive_that_is_given_up_is_free_again(has_come: bool) -> None:
    def body(comm: Communicator) -> None:
        x = on_device(np.ones(3))
        if comm.rank == 0:
            comm.send(x, 1)
            comm.barrier()
            comm.barrier()
            comm.synchronize()
            assert are_empty(boxes_of(comm))
        else:
            work: Any = comm.recv(np.zeros(3), 0, async_op=True) if not has_come else None
            comm.barrier()
            work = work or comm.recv(np.zeros(3), 0, async_op=True)
            work.give_up(RuntimeError("no longer wanted"))
            comm.barrier()

    run(body)


def test_a_receive_into_host_memory_does_not_wait_for_other_messages(word: np.ndarray) -> None:
    def body(comm: Communicator) -> None:
        x, y, z = on_device(np.ones(6)), on_device(np.zeros(6)), np.zeros(6)
        for is_held in (False, True):
            comm.synchronize()
            comm.barrier()
            if comm.rank == 1 and is_held:
                hold(BACKEND.current_stream(), word)
            if comm.rank:
                comm.send(x, 0)
            else:
                with BACKEND.on_stream(FakeStream("another")):
                    comm.recv(y, 1)
                comm.recv(z, 2)
                assert z.tolist() == [1.0] * 6
                assert not is_held or not word[0]
                word[:] = is_held

    run(body, 3)


def test_threads_that_send_their_first_messages_at_once_use_one_set_of_boxes() -> None:
    def body(comm: Communicator) -> None:
        for turn in range(10):
            part, x = comm.split(0), on_device(np.full(19, float(turn)))
            ready, routes = threading.Barrier(3), list[Any]()

            def exchange(tag: int, part: Any = part, x: Any = x) -> None:
                ready.wait()  # noqa: B023 - it ends in this turn
                around = 1 - comm.rank, 1 - comm.rank
                y = part.send_recv(x, *around, tag, timeout=20)  # type: ignore[misc]
                routes.append(session_of(part).devices.mail.route)  # noqa: B023
                assert values(y) == values(x)

            with ThreadPoolExecutor(3) as pool:
                for done in [pool.submit(exchange, tag) for tag in range(3)]:
                    done.result()
            assert len({id(route) for route in routes}) == 1
            part.synchronize()
            comm.barrier()
            part.free()

    with switching_every(1e-5):
        run(body)


def test_a_stream_that_is_captured_is_refused() -> None:
    """The rank has sent nothing, and goes on."""

    def body(comm: Communicator) -> None:
        x, y = on_device(np.ones(3)), on_device(np.zeros(3))
        with BACKEND.on_stream(FakeStream(f"captured by {comm.rank}")):
            stream = BACKEND.current_stream()
            gpu().capturing.add(stream.ptr)
            for is_async in (False, True):
                with pytest.raises(collectives.CollectiveError, match="is being captured"):
                    comm.send(x, 1 - comm.rank, async_op=is_async)  # type: ignore[call-overload]
            gpu().capturing.discard(stream.ptr)
        comm.send_recv(x, 1 - comm.rank, 1 - comm.rank, out=y)
        assert values(y) == [1.0] * 3

    run(body)


def test_a_send_that_is_given_up_lets_the_next_one_go(word: np.ndarray) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            hold(BACKEND.current_stream(), word)
            first: Any = comm.send(on_device(np.ones(3)), 1, async_op=True)
            first.give_up(RuntimeError("no longer wanted"))
            word[:] = 1
            second = comm.send(on_device(np.full(3, 2.0)), 1, async_op=True)
            second.wait()
            BACKEND.synchronize()
            transport_of(comm).failed.clear()  # or it would be kept until the process ends
        else:
            assert values(comm.recv(on_device(np.zeros(3)), 0)) == [2.0] * 3
        comm.barrier()

    run(body, device="staged")


def test_the_flight_recorder_shows_messages_as_enqueued_until_the_device_has_done_them(
    word: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    def body(comm: Communicator) -> None:
        x = on_device(np.ones(3))

        def state() -> Any:
            return comm.last_calls()[-1]["state"]

        comm.send_recv(x, 1 - comm.rank, 1 - comm.rank)
        comm.synchronize()
        assert state() == "complete"
        comm.barrier()
        hold(BACKEND.current_stream(), word)
        comm.send_recv(x, 1 - comm.rank, 1 - comm.rank)
        assert state() == "enqueued"
        comm.barrier()
        word[:] = 1
        comm.synchronize()

    run(body)
    assert not caplog.records


# At random


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_random_messages_arrive(seed: int) -> None:
    """Of all kinds and lengths, blocking and not, between any two ranks."""
    run(partial(random_messages, seed), 3)


def random_messages(seed: int, comm: Communicator, num_messages: int = 60) -> None:
    """All ranks know all messages; each makes its part, in the same order."""
    rng, works = random.Random(seed), list[Any]()
    for turn in range(num_messages):
        source, dest = rng.sample(range(comm.size), 2)
        length, tag = rng.choice(SIZES), rng.randrange(2)
        kinds = [rng.choice(["device", "device", "host"]) for _ in range(2)]
        is_async = [rng.random() < 0.5 for _ in range(2)]
        is_sender = comm.rank == source
        if comm.rank in (source, dest):
            with BACKEND.on_stream(FakeStream(f"{turn} of {comm.rank}")):
                x = array(kinds[is_sender], length, float(turn) if is_sender else -1.0)
                call: Any = comm.send if is_sender else comm.recv
                work = call(x, dest if is_sender else source, tag, async_op=is_async[is_sender])
                works.append((turn, work if is_async[is_sender] else None, x, is_sender, length))
        if rng.random() < 0.2:
            check_messages(works)
    check_messages(works)
    comm.synchronize()


def check_messages(works: list[Any]) -> None:
    """Wait for messages; those that were received have the number of their turn in all elements."""
    for turn, work, x, is_sender, length in works:
        if work is not None:
            work.wait()
        if not is_sender and work is not None:
            assert values(x) == [float(turn)] * length, turn
    works.clear()
