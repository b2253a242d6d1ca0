"""The kernel that interprets device programs gives what the programs say, and has no races."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives import algorithms
from collectives.arrays import HOST
from collectives.devices.kernel_program import BARRIER_AT, COUNT_AT, END, FIRST, words_of
from collectives.devices.table import rises_of
from collectives.lowering import DeviceKind, DeviceOperation, Place, Spans, in_order, in_steps
from collectives.lowering.verify import MemoryLayout, Sizes
from collectives.schedule import SPECS
from tests.algorithms.catalogue import EVERY
from tests.devices.kernel_on_host import Launch, OnRank, Variant, compiled, results
from tests.fakes.driver import combined
from tests.lowering.cases import Case, cases
from tests.scenarios.jobs import dtype

VARIANTS = [
    Variant("add", "float32"),
    Variant("add", "complex64"),
    Variant("maximum", "float16"),
    Variant("bitwise_xor", "uint8"),
    Variant(None, "float32"),
]
OPS = {"add": "sum", "maximum": "max", "bitwise_xor": "xor", None: "sum"}
NUM_RUNS = 3


class Runs:
    """A call in some runs on all ranks, whose memory is one piece on each rank.

    `number`: of the variant.
    """

    def __init__(self, case: Case, number: int, rng: random.Random) -> None:
        self.variant, self.number = VARIANTS[number], number
        self.dtype = dtype(self.variant.dtype)
        is_average = case.op == "avg" and self.variant.function == "add"
        op = "avg" if is_average else OPS[self.variant.function]
        self.case = case._replace(staged=frozenset(), dtype=self.variant.dtype, op=op)
        self.ranks = range(case.size)
        self.layouts = [
            MemoryLayout(Sizes(*self.case.lengths(rank), self.case.aliasing(rank)), program)
            for rank, program in enumerate(self.case.programs())
        ]
        self.lowered = self.case.lowered()
        self.images = [[self._image(rank, rng) for _ in range(NUM_RUNS)] for rank in self.ranks]
        self.shape = rng.choice(((1, 1), (1, 4), (2, 2), (3, 1)))
        step = self.dtype.itemsize // (1 + (self.dtype.kind == "c"))
        self.shifts = [rng.choice((0, 0, step * rng.randrange(16 // step))) for _ in self.ranks]

    def _image(self, rank: int, rng: random.Random) -> np.ndarray:
        """The memory of a rank before a run: small numbers, so that no sum is rounded."""
        real = np.dtype(f"f{self.dtype.itemsize // 2}") if self.dtype.kind == "c" else self.dtype
        num_bytes = self.layouts[rank].num_words * self.dtype.itemsize
        values = [rng.randrange(9) for _ in range(num_bytes // real.itemsize)]
        return np.array(values, real).view(np.uint8)

    def launch(self, *, has_barriers: bool = True) -> Launch:
        """What the kernels are to do."""
        ranks = [self._on_rank(rank) for rank in self.ranks]
        if not has_barriers:
            for rank in ranks:
                heads = [*heads_of(rank.words)]
                rank.words[heads] &= ~(1 << BARRIER_AT)
        return Launch(self.number, *self.shape, ranks)

    def _on_rank(self, rank: int) -> OnRank:
        memory = Spans(self.case.aliasing(rank), self.layouts[rank].itemsize)
        steps = [*in_steps(self.lowered[rank], memory)]
        words = words_of(steps, rank, self.case.size, rises_of(self.lowered), self.case.size)
        assert words is not None
        starts = [self.layouts[rank].starts[k] * self.dtype.itemsize for k in range(3)]
        return OnRank(words, starts, self.shifts[rank], self.images[rank])

    # What the programs say

    def wanted(self) -> list[list[np.ndarray]]:
        """The memory of all ranks after each run, of which the runs do not see the others."""
        after = [[image.copy() for image in images] for images in self.images]
        for run in range(NUM_RUNS):
            memories = [images[run] for images in after]
            for event in in_order([each.operations for each in self.lowered]):
                self._work(event.operation, memories)
        return after

    def _work(self, operation: DeviceOperation, memories: Sequence[np.ndarray]) -> None:
        if operation.target is None:
            return
        places = operation.target, *operation.operands
        target, *operands = (self._view(place, operation.size, memories) for place in places)
        if operation.kind == DeviceKind.COPY:
            target[...] = operands[0]
        elif operation.kind == DeviceKind.DIVIDE:
            HOST.divide(target, self.case.size)
        else:
            name = self.variant.function or ""
            target[...] = combined(name, operands[0], operands[1:], operation.lefts)

    def _view(self, place: Place, size: int, memories: Sequence[np.ndarray]) -> np.ndarray:
        part = self.layouts[place.rank].part(place.buffer, place.offset, size)
        width = self.dtype.itemsize
        return memories[place.rank][part.start * width : part.stop * width].view(self.dtype)


def heads_of(words: np.ndarray) -> Iterator[int]:
    """Where the rows of a program begin."""
    at = int(words[FIRST])
    while at < words[END]:
        yield at
        kind, count = int(words[at]) & 255, int(words[at]) >> COUNT_AT & 255
        at += 3 + count if kind > DeviceKind.AWAIT else 1 + 2 * count


def times(counts: Any, factor: int) -> Any:
    """Counts, each so many times as large."""
    if isinstance(counts, int):
        return factor * counts
    return tuple(times(count, factor) for count in counts)


def every_run(sizes: Sequence[int]) -> list[Runs]:
    """Every algorithm on these numbers of ranks."""
    rng, found = random.Random(3), []
    for collective, name in EVERY:
        is_reduction = SPECS[collective].is_reduction
        for size in filter(algorithms.info(collective, name).serves, sizes):
            (case,) = cases(collective, name, [size], 1)
            case = case._replace(counts=times(case.counts, rng.choice((1, 7))))
            found.append(Runs(case, rng.randrange(4) if is_reduction else 4, rng))
    return found


def check(binary: Path, every: Sequence[Runs], folder: Path, **faults: bool) -> str:
    """Run all; return what ThreadSanitizer objects to."""
    found, objections = results(binary, [each.launch(**faults) for each in every], folder)
    for runs, result in zip(every, found, strict=True):
        assert result.entered == [NUM_RUNS] * runs.case.size
        for rank, images in enumerate(runs.wanted()):
            for run, want in enumerate(images):
                after = result.memories[rank][run]
                np.testing.assert_array_equal(after, want, str((runs.case, rank, run)))
    return objections


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(VARIANTS, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without ThreadSanitizer the test is skipped; the source is compiled by another one, too."""
    folder = tmp_path_factory.mktemp("sanitized")
    try:
        binary = compiled(VARIANTS, folder, "-fsanitize=thread")
        results(binary, [], folder)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"ThreadSanitizer does not run here: {error}")
    return binary


@pytest.mark.slow
def test_every_algorithm_gives_what_its_device_programs_say(binary: Path, tmp_path: Path) -> None:
    check(binary, every_run([1, 2, 3, 4]), tmp_path)


@pytest.mark.slow
def test_no_algorithm_has_a_race(sanitized: Path, tmp_path: Path) -> None:
    assert check(sanitized, every_run([2, 3]), tmp_path) == ""


def test_a_race_is_noticed(sanitized: Path, tmp_path: Path) -> None:
    runs = Runs(Case("all_reduce", "two_shot", 4, 64), 0, random.Random(1))
    runs.shape = 3, 1
    assert results(sanitized, [runs.launch()], tmp_path)[1] == ""
    assert "data race" in results(sanitized, [runs.launch(has_barriers=False)], tmp_path)[1]


@pytest.mark.parametrize("shape", [(1, 1), (3, 2)])
def test_a_kernel_that_waits_says_where_it_stands_and_leaves(
    binary: Path, tmp_path: Path, shape: tuple[int, int]
) -> None:
    runs = Runs(Case("all_reduce", "ring", 4, 64), 0, random.Random(1))
    runs.shape = shape
    (result,), _ = results(binary, [runs.launch()._replace(absent=2)], tmp_path)
    waiting = [
        None if at == 0 else str(runs.lowered[rank].operations[at - 1].counter)
        for rank, at in enumerate(result.standing)
    ]
    assert waiting == ["ready 3->0", "ready 0->1", None, "ready 2->3"]
    assert result.entered == [3, 3, 0, 3]  # also the later runs leave
