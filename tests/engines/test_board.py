"""What ranks of a host show each other: records of calls, calls on host arrays, and counters."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np

from collectives.engines.board import Board, CallKey
from collectives.engines.host_memory import (
    MOST_RANKS,
    NUM_AREAS,
    NUM_ENTRIES,
    NUM_HOST_CALLS,
    NUM_PLANS,
    NUM_SLOTS,
    HostMemory,
    make_file,
    map_file,
    num_bytes,
    of_threads,
)
from tests.switching import switching_every


def boards(size: int = 2, identity: object = "world") -> list[Board]:
    """The boards of all ranks, in one memory."""
    memory = of_threads(size)
    return [Board(HostMemory(memory, size, r), range(size), r, identity) for r in range(size)]


def test_a_record_is_found_by_its_call() -> None:
    mine, other = boards()
    assert other.find(0, CallKey(3)) is None
    slot = mine.publish(CallKey(3), {"what": b"a call", "closing": (1, 2, 0)})
    assert slot is not None and other.find(0, CallKey(3)) == slot
    record = other.record(0, slot)
    assert (record["what"], record["closing"].tolist()) == (b"a call", [1, 2, 0])
    assert other.find(0, CallKey(4)) is other.find(0, CallKey(3, 1)) is None


def test_slots_are_used_again_when_all_have_acknowledged() -> None:
    mine, other, third = boards(3)
    keys = [CallKey(number) for number in range(1, NUM_SLOTS + 1)]
    slots = [mine.publish(key, {}) for key in keys]
    assert sorted(slots) == list(range(NUM_SLOTS))  # type: ignore[type-var]
    assert mine.publish(CallKey(99), {}) is None and not mine.has_room
    for board in (mine, other):
        board.acknowledge(0, keys[2])
        assert not mine.has_room
    third.acknowledge(0, keys[2])
    assert mine.has_room and mine.publish(CallKey(99), {}) == slots[2]
    assert other.find(0, keys[2]) is None and other.find(0, CallKey(99)) == slots[2]
    assert not mine.has_room


def test_what_is_acknowledged_before_it_is_published_is_so_afterwards() -> None:
    mine, other = boards()
    other.acknowledge(0, CallKey(1))
    for number in range(1, NUM_SLOTS + 1):
        mine.publish(CallKey(number), {})
        mine.acknowledge(0, CallKey(number))
    assert not mine.has_room
    assert other.has_room and mine.has_room


def test_a_rank_that_makes_the_call_on_host_arrays_need_not_acknowledge() -> None:
    mine, other = boards()
    for number in range(1, NUM_SLOTS + 1):
        mine.publish(CallKey(number), {})
        mine.acknowledge(0, CallKey(number))
    assert not mine.has_room
    other.note_host_call(1)
    assert mine.has_room


def test_a_call_on_host_arrays_is_known_by_its_number() -> None:
    mine, other = boards()
    assert not mine.is_on_host(1, CallKey(1))
    other.note_host_call(2)
    assert mine.is_on_host(1, CallKey(2)) and not mine.is_on_host(1, CallKey(3))
    assert not mine.is_on_host(1, CallKey(1))  # it may begin later than call 2
    other.publish(CallKey(3), {})
    other.note_host_call(3 + NUM_HOST_CALLS)
    assert not mine.is_on_host(1, CallKey(3))
    assert mine.is_on_host(1, CallKey(3 + NUM_HOST_CALLS))


def test_a_plan_on_a_device_is_not_taken_for_one_on_host_arrays() -> None:
    mine, other = boards()
    other.note_host_call(5 + NUM_HOST_CALLS)
    assert mine.is_on_host(1, CallKey(5, 1))
    assert other.note_plan(5)
    assert not mine.is_on_host(1, CallKey(5, 1))
    assert all(map(other.note_plan, range(6, 5 + NUM_PLANS)))
    assert not other.note_plan(5 + NUM_PLANS)  # there is no room for it
    other.forget_plan(5)
    assert mine.is_on_host(1, CallKey(5, 1)) and other.note_plan(5 + NUM_PLANS)


def test_counters_begin_at_zero_and_have_a_cache_line_each() -> None:
    mine, other = boards()
    slot = mine.publish(CallKey(1), {})
    assert slot is not None
    counters = [mine.counter(0, slot, reader, read) for reader in (0, 1) for read in (False, True)]
    places = [counter.ctypes.data for counter in counters]
    assert sorted(np.diff(places)) == [64, 64, 64] and places[0] % 64 == 0
    counters[2][0] = 7
    assert other.counter(0, slot, 1, False)[0] == 7
    for board in (mine, other):
        board.acknowledge(0, CallKey(1))
    assert mine.publish(CallKey(2), {}) == slot and counters[2][0] == 0


def test_communicators_do_not_see_each_others_calls() -> None:
    memory = of_threads(2)
    memories = [HostMemory(memory, 2, rank) for rank in range(2)]
    first, second = ([Board(m, range(2), r, name) for r, m in enumerate(memories)] for name in "ab")
    first[0].publish(CallKey(1), {})
    second[0].note_host_call(8)
    assert first[1].find(0, CallKey(1)) is not None and second[1].find(0, CallKey(1)) is None
    assert not first[1].is_on_host(0, CallKey(2)) and second[1].is_on_host(0, CallKey(8))


def test_the_memory_of_a_freed_communicator_is_kept_until_nobody_reads_it() -> None:
    memory = of_threads(2)
    memories = [HostMemory(memory, 2, rank) for rank in range(2)]
    mine, other = (Board(m, range(2), r, "first") for r, m in enumerate(memories))
    mine.publish(CallKey(1), {})
    mine.acknowledge(0, CallKey(1))
    mine.free()
    assert other.find(0, CallKey(1)) is not None
    other.acknowledge(0, CallKey(1))
    Board(memories[0], range(2), 0, "second")  # looks after what is freed
    assert other.find(0, CallKey(1)) is None


def test_areas_and_entries_that_are_used_up_leave_calls_on_the_host() -> None:
    memory = HostMemory(of_threads(2), 2, 0)
    made = [Board(memory, range(2), 0, number) for number in range(NUM_ENTRIES + 1)]
    areas = [board.area for board in made[: NUM_AREAS + 1]]
    assert [area is None for area in areas] == [False] * NUM_AREAS + [True]
    assert "too many communicators" in made[NUM_AREAS].why_no_area
    assert "more communicators than it can show" in made[-1].why_no_area
    made[-1].note_host_call(1)  # which nobody sees


def test_threads_of_a_rank_that_make_communicators_at_once_share_no_memory() -> None:
    memory, ready = HostMemory(of_threads(2), 2, 0), Barrier(NUM_AREAS)

    def places_of(number: int) -> tuple[int, int]:
        ready.wait(20)
        board = Board(memory, range(2), 0, number)
        places = board.host_calls.ctypes.data, board.area["boxes"].ctypes.data
        ready.wait(20)
        board.free()
        return places

    with switching_every(1e-6), ThreadPoolExecutor(NUM_AREAS) as pool:
        for _ in range(30):
            entries, areas = zip(*pool.map(places_of, range(NUM_AREAS)), strict=True)
            assert len(set(entries)) == len(set(areas)) == NUM_AREAS


def test_a_rank_without_an_entry_is_known_to_be_on_the_host() -> None:
    memory = of_threads(2)
    memories = [HostMemory(memory, 2, rank) for rank in range(2)]
    mine = Board(memories[0], range(2), 0, "the last")
    assert not mine.is_on_host(1, CallKey(1))
    for number in range(NUM_ENTRIES):
        Board(memories[1], range(2), 1, number)
    other = Board(memories[1], range(2), 1, "the last")
    assert other.why_no_area and mine.is_on_host(1, CallKey(1))


def test_what_belongs_to_a_freed_communicator_is_not_changed_any_more() -> None:
    memory = HostMemory(of_threads(2), 2, 0)
    freed = Board(memory, range(2), 0, "freed")
    assert freed.note_plan(3)
    freed.free()
    later = Board(memory, range(2), 0, "later")
    assert later.note_plan(3)
    freed.forget_plan(3)
    freed.acknowledge(1, CallKey(3))
    assert 3 in later.area["plans"]


def test_ranks_of_other_hosts_have_no_part() -> None:
    memory = of_threads(2)
    board = Board(HostMemory(memory, 2, 1), [None, 0, 1], 2, "world")
    assert board.local_ranks == [1, 2]
    alone = Board(None, [None, None], 1, "world", "there is no memory")
    assert alone.local_ranks == [1] and alone.area is None
    assert alone.why_no_device == "there is no memory"


def test_too_many_ranks_of_a_host_use_no_device() -> None:
    memory = HostMemory(of_threads(MOST_RANKS + 1), MOST_RANKS + 1, 0)
    assert Board(memory, range(MOST_RANKS + 1), 0, "world").area is None
    assert num_bytes(MOST_RANKS + 1) < num_bytes(MOST_RANKS)


# Files


def test_a_file_is_the_same_memory_for_all_who_map_it() -> None:
    path = make_file(2)
    try:
        first, second = map_file(path, 2), map_file(path, 2)
    finally:
        os.unlink(path)
    mine, other = (
        Board(HostMemory(m, 2, r), range(2), r, "w") for r, m in ((0, first), (1, second))
    )
    mine.publish(CallKey(1), {})
    assert other.find(0, CallKey(1)) is not None


def test_no_room_is_an_error_and_no_signal(tmp_path: Path) -> None:
    program = (
        "import resource\n"
        "from collectives.engines import host_memory\n"
        f"host_memory.FOLDER = {str(tmp_path)!r}\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try: host_memory.make_file(4)\n"
        "except OSError as error: print('refused', error.errno)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("refused")
    assert list(tmp_path.iterdir()) == []
