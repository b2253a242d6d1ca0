"""The second proof of every algorithm, through its bound plans: each element arrives where it must.

Elements are words.  A rank's inputs are words of its own; combining two elements joins their words.
So the result of a plan says of every single element where it came from, and in which order it was
combined: nothing in layout, packing, scratch or reuse of memory can be wrong and stay unseen.  The
plans are real ones, made by the public calls, and are driven in turn by one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bench.workloads.expected import expected
from collectives import Communicator, Operator, Plan, algorithms
from collectives.engines.threads import ThreadTransport, World
from collectives.programs import placement
from collectives.runtime.session import Session
from collectives.schedule.contracts import SPECS
from tests.algorithms.catalogue import EVERY, settings
from tests.covering import pairwise
from tests.inside import forget_programs

SIZES = [*range(1, 10), 12, 13]


class Words:
    """Words, and the numbers that stand for them in arrays."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.numbers: dict[str, int] = {}
        self.join = Operator.from_function(self._joined, name="join")
        self.mix = Operator.from_function(self._joined, commutative=True, name="mix")

    def number(self, word: str) -> int:
        if word not in self.numbers:
            self.numbers[word] = len(self.words)
            self.words.append(word)
        return self.numbers[word]

    def encoded(self, words: np.ndarray) -> np.ndarray:
        return np.array([self.number(word) for word in words], np.int64)

    def decoded(self, numbers: np.ndarray) -> list[str]:
        return [self.words[number] for number in numbers]

    def _joined(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        pairs = zip(left, right, strict=True)
        return np.array([self.number(self.words[a] + self.words[b]) for a, b in pairs], np.int64)


def own_words(rank: int, length: int) -> np.ndarray:
    return np.array([f"{rank}:{index};" for index in range(length)], object)


class Layout:
    """Uneven blocks, some of them empty: how long each rank's input and output is."""

    def __init__(self, collective: str, size: int, length: int) -> None:
        self.collective, self.size = collective, size
        self.counts = [(5 * rank + length) % 4 for rank in range(size)]
        if collective == "all_to_all":
            self.counts = [[(s + 3 * d + length) % 4 for d in range(size)] for s in range(size)]
        self.length = length if SPECS[collective].has_pieces else None

    def keywords(self) -> dict[str, Any]:
        return {} if self.length is not None else {"counts": self.counts}

    def lengths(self, rank: int, root: int) -> tuple[int | None, int | None]:
        """Of input and output; None where the rank has none."""
        collective, counts = self.collective, self.counts
        if self.length is not None:
            has_input = collective != "broadcast" or rank == root
            has_output = {"reduce": rank == root, "exscan": rank > 0}.get(collective, True)
            return self.length if has_input else None, self.length if has_output else None
        if collective == "all_to_all":
            return sum(counts[rank]), sum(row[rank] for row in counts)
        total, is_root = sum(counts), rank == root
        return {
            "scatter": (total if is_root else None, counts[rank]),
            "gather": (counts[rank], total if is_root else None),
            "all_gather": (counts[rank], total),
            "reduce_scatter": (total, counts[rank]),
        }[collective]


def memory(layout: Layout, rank: int, root: int, in_place: bool) -> tuple[Any, Any]:
    """(x, out) in separate memory, or in the same where it can be."""
    num_in, num_out = layout.lengths(rank, root)
    x, out = (None if n is None else np.full(n, -1, np.int64) for n in (num_in, num_out))
    if not in_place or x is None or out is None:
        return x, out
    if x.size == out.size:
        return x, x
    if layout.collective == "all_to_all":
        return x, out
    start = sum(layout.counts[:rank])
    part = slice(start, start + layout.counts[rank])
    return (x, x[part]) if x.size > out.size else (out[part], out)


def run_together(plans: list[Plan]) -> None:
    """Drive all ranks' plans in turn until all are complete."""
    for plan in plans:
        plan.start()
    for _ in range(10_000):
        num_done = sum(plan.test() for plan in plans)
        if num_done == len(plans):
            return
    raise AssertionError("the plans wait for one another")


def results(
    collective: str, name: str, layout: Layout, root: int, in_place: bool, words: Words
) -> tuple[list[Any], list[Any]]:
    """Every rank's result through plans, and what it should be, in words."""
    world, size = World(layout.size), layout.size
    is_ordered = algorithms.info(collective, name.partition("(")[0]).is_ordered
    keywords = layout.keywords() | {"algorithm": name}
    keywords |= {"root": root} if SPECS[collective].is_rooted else {}
    if SPECS[collective].is_reduction:
        keywords["op"] = words.join if is_ordered else words.mix
    inputs, plans, outs = [], [], []
    for rank in range(size):
        x, out = memory(layout, rank, root, in_place)
        inputs.append(own_words(rank, 0 if x is None else x.size))
        if x is not None:
            x[...] = words.encoded(inputs[rank])
        comm = Communicator(Session(ThreadTransport(world, range(size), rank)))
        plans.append(getattr(comm.plan, collective)(x, out=out, **keywords))
        outs.append(out)
    run_together(plans)
    assert not world.mail, "a message was not received"
    table = None if layout.length is not None else layout.counts
    want = expected(collective, inputs, root=root, counts=table)
    return [None if out is None else words.decoded(out) for out in outs], [
        None if row is None else row.tolist() for row in want
    ]


def in_any_order(elements: list[str] | None) -> list[list[str]] | None:
    return None if elements is None else [sorted(element.split(";")) for element in elements]


def labels(collective: str, name: str) -> Iterator[tuple[str, list[int]]]:
    """The algorithm by its defaults, and with every other setting of one option; with its sizes."""
    entry = algorithms.info(collective, name)
    yield name, [*filter(entry.serves, SIZES)]
    if "shards" in entry.options:  # these need other arrays: tests/algorithms/test_invariant.py
        return
    for setting in settings(collective, name):
        changed = {key: value for key, value in setting.items() if value != entry.options[key]}
        if len(changed) == 1:
            label = f"{name}({', '.join(f'{key}={value}' for key, value in changed.items())})"
            yield label, [size for size in SIZES if entry.serves(size, **changed)]


def cases(collective: str, name: str) -> Iterator[tuple[str, int, int, int, bool]]:
    """(label, size, root, length, in_place): for each label, all pairs of the others.

    Of a short array some blocks are empty.
    """
    roots = (0, 1, 2) if SPECS[collective].is_rooted else (0,)
    for label, sizes in labels(collective, name):
        for size, root, is_long, in_place in pairwise(sizes, roots, (False, True), (False, True)):
            places = 0, size // 2, size - 1
            yield label, size, places[root], 2 * size + 3 if is_long else 5, in_place


@pytest.mark.parametrize(("collective", "name"), [e for e in EVERY if e[0] != "barrier"])
@pytest.mark.slow
def test_every_element_arrives_through_bound_plans(collective: str, name: str) -> None:
    is_ordered, words = algorithms.info(collective, name).is_ordered, Words()
    for label, size, root, length, in_place in cases(collective, name):
        layout = Layout(collective, size, length)
        got, want = results(collective, label, layout, root, in_place, words)
        if SPECS[collective].is_reduction and not is_ordered:
            got, want = [[*map(in_any_order, rows)] for rows in (got, want)]
        where = f"{label} on {size} ranks, root {root}, length {length}, {in_place=}"
        assert got == want, where


@pytest.fixture
def _swapped_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs that take every buffer's blocks, all of one size, to lie the other way round."""
    right = placement.consecutive

    def swapped(*layout: Any) -> Any:
        places = right(*layout)
        return dict(zip(places, reversed(places.values()), strict=True))

    forget_programs()
    monkeypatch.setattr(placement, "consecutive", swapped)
    yield
    forget_programs()


@pytest.mark.usefixtures("_swapped_blocks")
def test_a_program_that_misplaces_blocks_is_noticed() -> None:
    layout = Layout("all_gather", 3, 5)
    layout.counts = [2, 2, 2]
    got, want = results("all_gather", "circulant", layout, 0, False, Words())
    assert got != want


def test_a_combination_in_the_wrong_order_is_noticed() -> None:
    words = Words()
    words.join = words.mix  # the plan may then run where the order is not kept
    got, want = results("reduce", "binomial", Layout("reduce", 5, 4), 2, False, words)
    assert got != want
    assert [*map(in_any_order, got)] == [*map(in_any_order, want)]
