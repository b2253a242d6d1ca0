"""What ranks say of themselves: brought together as it was, and compared."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import Recipe
from parallel.accounts import gather_json
from parallel.commands.rank_report import RankReport, differences, gather_reports, pairs
from parallel.optim.storage import READ, WRITTEN, Disk, HostMemory
from tests.parallel.training import CONTEXT, End, batch, ddp, hsdp, model, train, zero1, zero3

STEPS = 2

# One rank's


def report_of(end: End) -> RankReport:
    strategy = end.strategy
    updates = strategy.num_updates_in(STEPS) - strategy.updates.num_skipped
    return RankReport.of(strategy, updates, len(batch(0, *strategy.batch_part)[0]), CONTEXT)


def reports(make: Any, ranks: int, **recipe: Any) -> list[RankReport]:
    return [report_of(end) for end in train(make, ranks, Recipe(**recipe), steps=STEPS)]


def test_memory_is_by_formula_and_counted() -> None:
    """Of ZeRO-1 on two ranks: each updates half of every unit, and the sizes are even."""
    psi = model().num_parameters
    half = max(model().unit_sizes.values())  # bytes of the half that the other rank sends
    largest = -(-half // 64) * 64
    for report in reports(zero1, 2, dtype="float16"):
        kept = {name: pair for name, pair in report.memory.items() if name != "activations"}
        assert kept == {
            "parameters": (2 * psi, 2 * psi),
            "gradients": (2 * psi, 2 * psi),
            "optimizer": (4 * psi, 4 * psi),
            "master": (2 * psi, 2 * psi),
            "buffers": (0, 0),
            "scratch": (largest, largest),
            "messages": (0, 0),
        }
        formula, counted = report.memory["activations"]
        assert formula == counted > 0
        assert report.moved == {}


def test_what_is_elsewhere_has_names_of_its_own() -> None:
    psi = model().num_parameters
    for report in reports(zero1, 2, offload=HostMemory):
        assert report.memory["master, offloaded"] == (4 * psi, 4 * psi)
        assert report.memory["optimizer, offloaded"] == (8 * psi, 8 * psi)
        assert report.memory["master"] == report.memory["optimizer"] == (0, 0)


def test_what_is_moved_is_by_formula_and_counted(tmp_path: Any) -> None:
    """Two updates of three files each, 8 bytes an element; once the masters are made."""
    psi = model().num_parameters
    for report in reports(zero1, 2, offload=partial(Disk, tmp_path)):
        read, written = 2 * 3 * 4 * psi, (2 * 3 + 1) * 4 * psi
        assert report.moved[READ] == (read, read)
        assert report.moved[WRITTEN] == (written, written)


@pytest.mark.parametrize(("make", "ranks"), [(ddp, 2), (zero3, 3), (hsdp, 4)])
def test_parameters_are_digests_of_the_elements_that_a_rank_has(make: Any, ranks: int) -> None:
    ends = train(make, ranks, steps=1)
    for end in ends:
        for unit, (start, stop, digest) in report_of(end).parameters.items():
            part, x = end.held[unit]
            assert (start, stop) == (part.start, part.stop)
            assert digest == hashlib.sha256(x.tobytes()).hexdigest()
    assert not differences([report_of(end) for end in ends])


def test_pairs_have_zero_for_what_one_does_not_know() -> None:
    assert pairs({"a": 1, "b": np.int64(2)}, {"b": 3, "c": 4}) == {
        "a": (1, 0),
        "b": (2, 3),
        "c": (0, 4),
    }


# All ranks'

SAID: list[Any] = [{"a": [1, 2.5, None]}, "", "grün", [], {"nested": {"long": "x" * 5000}}]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_what_json_can_say_comes_to_rank_0_in_the_order_of_ranks(ranks: int) -> None:
    """Of other lengths on every rank; "" and [] are the shortest."""
    first, *others = collectives.run(lambda comm: gather_json(comm, SAID[comm.rank]), size=ranks)
    assert first == SAID[:ranks]
    assert others == [None] * (ranks - 1)


def test_reports_come_to_rank_0() -> None:
    def fn(comm: Communicator) -> list[RankReport] | None:
        pair = comm.rank, 2 * comm.rank
        return gather_reports(
            comm, RankReport({"gradients": pair}, {}, {"head": (0, 3, "ab" * comm.rank)})
        )

    first, *others = collectives.run(fn, size=3)
    assert others == [None, None]
    assert [list(each.memory["gradients"]) for each in first] == [[0, 0], [1, 2], [2, 4]]
    assert [list(each.parameters["head"]) for each in first] == [
        [0, 3, ""],
        [0, 3, "ab"],
        [0, 3, "abab"],
    ]
    assert differences(first) == [
        "gradients of rank 1: 1 by formula, 2 counted",
        "gradients of rank 2: 2 by formula, 4 counted",
        "parameters of head on ranks 0 and 1",
        "parameters of head on ranks 0 and 2",
    ]


# Differences


def report(**changes: Any) -> RankReport:
    same = RankReport(
        {"parameters": (8, 8), "buffers": (0, 0)}, {READ: (5, 5)}, {"head": (0, 4, "abc")}
    )
    return same._replace(**changes)


def test_nothing_differs_where_all_is_equal() -> None:
    assert differences([report(), report()]) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"memory": {"parameters": (8, 9)}}, "parameters of rank 1: 8 by formula, 9 counted"),
        ({"memory": {"other": (0, 1)}}, "other of rank 1: 0 by formula, 1 counted"),
        ({"moved": {READ: (5, 4)}}, "read from disk of rank 1: 5 by formula, 4 counted"),
        ({"parameters": {"head": (0, 4, "abd")}}, "parameters of head on ranks 0 and 1"),
    ],
)
def test_whatever_differs_is_named(changed: dict[str, Any], said: str) -> None:
    assert differences([report(), report(**changed), report()]) == [said]


def test_only_the_same_elements_are_compared() -> None:
    """Of ranks that have other parts of a unit, or other units."""
    others = [{"head": (4, 8, "x")}, {"head": (0, 3, "y")}, {"other": (0, 4, "z")}, {}]
    assert differences([report(), *(report(parameters=each) for each in others)]) == []


def test_a_bit_is_enough() -> None:
    """Of real ranks."""
    ends = train(ddp, 3, steps=1)
    assert differences([report_of(end) for end in ends]) == []
    first = ends[2].strategy.parameters["block1"]
    first[7] = np.nextafter(first[7], np.inf)
    assert differences([report_of(end) for end in ends]) == [
        "parameters of block1 on ranks 0 and 2"
    ]
