"""Large reductions cut into lanes: the same results, pipelined, in little scratch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator, algorithms
from collectives.algorithms import registry
from collectives.programs import lanes
from collectives.programs.lanes import WIDTH, Event, compile_lanes, num_lanes, order
from collectives.schedule import RecvReduce, Round, Send
from collectives.schedule.contracts import SPECS, Piece
from tests.inside import forget_programs
from tests.programs.test_plan_proof import Layout, Words, in_any_order, results

REDUCTIONS = [
    (collective, name)
    for collective, spec in SPECS.items()
    if spec.is_reduction
    for name in algorithms.names(collective)
]


@pytest.fixture
def _tiny_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Segments of two elements of eight bytes."""
    monkeypatch.setattr(lanes, "SEGMENT_BYTES", 16)
    forget_programs()
    yield
    forget_programs()


def cut(collective: str, name: str, size: int, num_bytes: int) -> int:
    return num_lanes(algorithms.info(collective, name), size, num_bytes)


@pytest.mark.usefixtures("_tiny_segments")
@pytest.mark.parametrize(("collective", "name"), REDUCTIONS)
@pytest.mark.slow
def test_every_element_arrives_where_it_must(collective: str, name: str) -> None:
    entry, words = algorithms.info(collective, name), Words()
    for size in filter(entry.serves, (2, 3, 4, 8)):
        for length, in_place in product((5, 16 * size + 3), (False, True)):
            layout = Layout(collective, size, length)
            if layout.length is None:
                layout.counts = [(7 * rank + length) % 11 for rank in range(size)]
            got, want = results(collective, name, layout, size - 1, in_place, words)
            if not entry.is_ordered:
                got, want = [[*map(in_any_order, rows)] for rows in (got, want)]
            assert got == want, f"{size} ranks, length {length}, {in_place=}"


@pytest.mark.usefixtures("_tiny_segments")
def test_a_lane_in_the_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lanes._part
    monkeypatch.setattr(lanes, "_part", lambda *args: max(0, right(*args) - 1))
    got, want = results("all_reduce", "ring", Layout("all_reduce", 2, 40), 0, False, Words())
    assert [*map(in_any_order, got)] != [*map(in_any_order, want)]


def test_whole_vectors_are_cut_and_blocks_that_travel_alone() -> None:
    n = 64 * 2**20
    per_rank = n // (4 * lanes.SEGMENT_BYTES)
    assert cut("all_reduce", "ring", 4, n) == cut("reduce_scatter", "ring", 4, n) == per_rank
    assert cut("all_reduce", "recursive_doubling", 4, n) == n // lanes.SEGMENT_BYTES
    assert cut("all_reduce", "ring", 4, n + 1) == per_rank + 1
    assert cut("all_reduce", "ring", 4, lanes.SEGMENT_BYTES) == 1
    assert cut("all_reduce", "ring", 1, n) == 1
    assert cut("reduce_scatter", "recursive_halving", 4, n) == 1  # it sends several blocks as one
    assert cut("all_reduce", "segmented_ring", 4, n) == 1  # it has segments of its own
    assert cut("all_gather", "ring", 4, n) == 1  # nothing is combined


def test_blocks_in_pieces_are_not_cut_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.REGISTRY, "reduce_scatter", {})

    @algorithms.register("reduce_scatter", pieces="2")
    def in_halves(rank: int, size: int) -> Iterator[Round]:
        for distance in range(1, size):
            to, source = (rank + distance) % size, (rank - distance) % size
            for half in range(2):
                sends = Send(to, [Piece(to, half)])
                yield sends, RecvReduce(source, [Piece(rank, half)])

    def body(comm: Communicator) -> bool:
        x = np.arange(comm.size * lanes.SEGMENT_BYTES // 8 + comm.size) % 97 * (comm.rank + 1.0)
        part = comm.reduce_scatter(x, algorithm="in_halves")
        want = np.array_split(6 * x / (comm.rank + 1), comm.size)[comm.rank]
        return np.array_equal(part, want)

    assert collectives.run(body, 3) == [True] * 3


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("num_rounds", [0, 1, 2, 7])
def test_the_order_is_one_in_which_nobody_waits_for_ever(num_lanes: int, num_rounds: int) -> None:
    events = list(order(num_lanes, num_rounds))
    every = {(lane, number) for lane in range(num_lanes) for number in range(num_rounds)}
    begun: list[tuple[int, int]] = []
    done: list[tuple[int, int]] = []
    for lane, number, is_start in events:
        if is_start:
            assert number == 0 or (lane, number - 1) in done
            begun.append((lane, number))
        else:
            done.append((lane, number))
            assert done == begun[: len(done)], "what was started first is waited for first"
        assert len(begun) - len(done) <= WIDTH
    assert len(begun) == len(every) and set(done) == every


def test_while_one_lane_combines_the_next_ones_messages_travel() -> None:
    events, in_progress = list(order(8, 2)), 0
    for event, following in pairwise(events):
        in_progress += 1 if event.is_start else -1
        if not event.is_start and following != Event(7, 1, is_start=False):
            assert in_progress >= 1


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(
    ("collective", "name", "in_place"),
    [
        ("all_reduce", "ring", False),
        ("all_reduce", "ring", True),
        ("reduce_scatter", "ring", False),
        ("reduce_scatter", "pairwise", False),
    ],
)
def test_a_ring_needs_at_most_4_mib_of_scratch(
    collective: str, name: str, in_place: bool, size: int
) -> None:
    num_elements = 2**26 // 4 * size  # 64 MiB for each rank
    counts: Any = num_elements
    if not SPECS[collective].has_pieces:
        counts = (num_elements // size,) * size
    aliasing: Any = 0 if in_place else "none"
    entry = algorithms.info(collective, name)
    num_lanes = cut(collective, name, size, 4 * num_elements)
    program = compile_lanes(entry, 1, size, 0, counts, (), aliasing, num_lanes)
    assert num_lanes >= 128
    assert 4 * program.num_scratch * program.num_slots <= 4 * 2**20


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_large_arrays_at_awkward_counts_and_places_are_right(op: str) -> None:
    num_elements = 3 * lanes.SEGMENT_BYTES // 8 * 3 + 5

    def body(comm: Communicator) -> None:
        inputs = [np.arange(num_elements) % 1000 * (rank + 1.0) for rank in range(comm.size)]
        want = {"sum": np.sum, "avg": np.mean, "max": np.max}[op](inputs, axis=0)
        memory = np.empty(num_elements + 1)
        for x, out in (
            (inputs[comm.rank].copy(), None),
            (memory[:-1], memory[:-1]),
            (memory[:-1], memory[1:]),  # every lane would overwrite what the next one reads
        ):
            x[...] = inputs[comm.rank]
            with comm.record() as ledger:
                got = comm.all_reduce(x, op, out=out, algorithm="ring")
            assert np.array_equal(got, want)
            (sent,) = ledger.summary().values()
            assert sent.messages == 2 * (comm.size - 1) * num_segments
            part = comm.reduce_scatter(got, op, algorithm="ring")
            rows = np.array_split(want, comm.size)[comm.rank]
            assert np.allclose(part, rows if op != "sum" else comm.size * rows)

    num_segments = cut("all_reduce", "ring", 3, 8 * num_elements)
    assert num_segments > 1
    collectives.run(body, 3)
