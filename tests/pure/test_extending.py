"""Algorithms of the user's own: proved before they are entered, and then like any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import collectives
from bench.__main__ import main
from collectives import ScheduleError, algorithms
from collectives.algorithms.registry import REGISTRY
from collectives.schedule import Recv, RecvReduce, Round, Send


@pytest.fixture(autouse=True)
def _registry_as_it_was() -> Iterator[None]:
    before = {collective: dict(entries) for collective, entries in REGISTRY.items()}
    yield
    for collective, entries in before.items():
        REGISTRY[collective].clear()
        REGISTRY[collective].update(entries)


def line(rank: int, size: int) -> Iterator[Round]:
    """Along the line of ranks and back again."""
    for k in range(size - 1):
        yield (Send(k + 1, [0]),) if rank == k else (RecvReduce(k, [0]),) if rank == k + 1 else ()
    for k in range(size - 1, 0, -1):
        yield (Send(k - 1, [0]),) if rank == k else (Recv(k, [0]),) if rank == k - 1 else ()


def register_line(**more: Any) -> None:
    algorithms.register("all_reduce", **more)(line)


def test_a_registered_algorithm_is_used_by_name() -> None:
    register_line(is_ordered=True, is_bitwise=True, rounds="2 * (p - 1)")
    assert algorithms.names("all_reduce")[-1] == "line"

    def total(comm: collectives.Communicator) -> float:
        with comm.record() as ledger:
            result = comm.all_reduce(np.arange(3.0), algorithm="line")[2]
        assert {row.algorithm for row in ledger.rows()} <= {"line"}
        plan = comm.plan.all_reduce(np.ones(3), algorithm="line")
        return float(result + plan.run()[0])

    assert collectives.run(total, 4) == [12.0] * 4


def test_what_has_no_formula_is_counted() -> None:
    register_line(rounds="2 * (p - 1)")
    entry = algorithms.info("all_reduce", "line")
    assert str(entry.rounds) == "2 * (p - 1)" and str(entry.busiest) == "counted"
    assert [entry.busiest(p=p, n=10) for p in (1, 2, 3, 9)] == [0, 10, 20, 20]
    assert entry.total(p=9, n=10) == 160 and entry.work(p=9, n=10) == 10


def test_counting_takes_the_worst_root() -> None:
    @algorithms.register("broadcast", name="from_the_left")
    def star_or_line(rank: int, size: int, root: int) -> Iterator[Round]:
        if root == 0:
            return algorithms.info("broadcast", "linear").function(rank, size, root)
        rounds = algorithms.info("broadcast", "binomial").function(rank, size, root)
        return iter([*rounds, *[()] * (size - 1 - (size - 1).bit_length())])

    assert algorithms.info("broadcast", "from_the_left").busiest(p=8, n=1) == 7


def test_it_has_its_place_in_grids_benchmarks_and_documents(tmp_path: Any) -> None:
    register_line()
    assert algorithms.grid("all_reduce", "line", size=2).splitlines() == [
        "rank  round 0  round 1",
        "0     >1:0     <1:0",
        "1     +0:0     >0:0",
    ]
    assert main(["docs", "--root", str(tmp_path)]) == 0
    page = (tmp_path / "docs" / "algorithms.md").read_text()
    assert "### all_reduce.line\n\nAlong the line of ranks and back again." in page
    assert "| `line` | counted |" in page.replace("`counted`", "counted")


def test_options_are_proved_and_passed_on() -> None:
    @algorithms.register("broadcast", options={"segments": 2}, pieces="N", total="(p - 1) * n")
    def my_pipeline(rank: int, size: int, root: int, segments: int = 2) -> Iterator[Round]:
        return algorithms.info("broadcast", "pipeline").function(rank, size, root, segments)

    entry = algorithms.info("broadcast", "my_pipeline")
    assert entry.rounds(p=5) == 5 and entry.rounds(p=5, segments=4) == 7
    algorithms.verify("broadcast", "my_pipeline", 5, 3, segments=7)


def test_a_wrong_schedule_is_refused_with_the_grid_and_the_cell_marked() -> None:
    def one_way(rank: int, size: int) -> Iterator[Round]:
        return iter([*line(rank, size)][: size - 1])

    with pytest.raises(ScheduleError) as refused:
        algorithms.register("all_reduce")(one_way)
    assert str(refused.value).splitlines() == [
        "rank 0, round 0: block 0 ends as ((0, 0),), not ((0, 0), (1, 0))",
        "rank  round 0",
        "0     [>1:0]",
        "1     +0:0",
    ]
    assert "one_way" not in algorithms.names("all_reduce")


def test_a_promise_that_is_not_kept_is_refused() -> None:
    census = algorithms.info("all_reduce", "census").function
    with pytest.raises(ScheduleError, match="ends as"):
        algorithms.register("all_reduce", name="mine", is_ordered=True)(census)
    with pytest.raises(ScheduleError, match="last bits may differ"):
        algorithms.register("all_reduce", name="mine", is_bitwise=True)(census)
    algorithms.register("all_reduce", name="mine")(census)


def test_every_option_is_proved_with_other_values_than_its_default() -> None:
    def trap(rank: int, size: int, root: int, segments: int = 2) -> Iterator[Round]:
        rounds = algorithms.info("broadcast", "pipeline").function(rank, size, root, segments)
        return iter([*rounds][: -1 if segments == 3 and size > 1 else None])

    with pytest.raises(ScheduleError, match="ends as"):
        algorithms.register("broadcast", options={"segments": 2}, pieces="N")(trap)


def test_formulas_state_the_worst_of_all_roots() -> None:
    def slow_from_two(rank: int, size: int, root: int) -> Iterator[Round]:
        name = "linear" if root == 2 else "binomial"
        rounds = [*algorithms.info("broadcast", name).function(rank, size, root)]
        return iter([*rounds, *[()] * (size - 1 - len(rounds))])

    with pytest.raises(ValueError, match=r"busiest is q \* n"):
        algorithms.register("broadcast", busiest="q * n")(slow_from_two)


def test_the_function_gets_the_options_that_were_declared() -> None:
    bruck = algorithms.info("all_gather", "bruck").function
    algorithms.register("all_gather", name="wide", options={"radix": 8}, rounds="log(p, r)")(bruck)
    assert len(algorithms.schedule("all_gather", "wide", rank=0, size=8)) == 1


def test_a_wrong_formula_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 ranks, 2 bytes, \{\}: rounds is p - 1 = 1, counted 2"):
        register_line(rounds="p - 1")


def test_numbers_of_ranks_it_does_not_serve_are_left_out() -> None:
    swing = algorithms.info("all_gather", "swing").function
    with pytest.raises((ScheduleError, ValueError)):
        algorithms.register("all_gather", name="mine")(swing)
    algorithms.register("all_gather", name="mine", ranks="even")(swing)


@pytest.mark.parametrize(
    ("collective", "more", "sentence"),
    [
        ("allreduce", {}, "unknown collective 'allreduce'"),
        ("all_reduce", {"bytes": "n"}, "there is no formula 'bytes'"),
        ("all_reduce", {"name": "ring"}, "all_reduce has an algorithm 'ring' already"),
        ("all_reduce", {"ranks": "prime"}, "ranks must be one of"),
        ("all_reduce", {"options": {"speed": 1}}, "no option 'speed'"),
        ("all_reduce", {"rounds": "2 *"}, "formula '2 \\*'"),
        ("all_reduce", {"rounds": "z"}, "formula 'z'"),
        ("all_reduce", {"rounds": "p / (p - 2)"}, "formula 'p"),
        ("all_reduce", {"pieces": "3 / 2"}, "cuts into 3/2 pieces"),
        ("all_reduce", {"name": "my(line)"}, "identifier, not 'my\\(line\\)'"),
        ("all_reduce", {"ranks": "multiple of per_host"}, "needs options with per_host"),
        ("all_reduce", {"options": {"segments": 2}}, "cannot be called with rank, size, segments"),
        ("all_reduce", {"options": {"segments": 0}}, "segments is at least 1"),
    ],
)
def test_what_cannot_be_registered_is_refused(
    collective: str, more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        algorithms.register(collective, **more)(line)


def test_a_name_may_be_registered_again_by_who_registered_it() -> None:
    register_line()
    register_line(is_ordered=True)
    assert algorithms.info("all_reduce", "line").is_ordered


def test_registered_again_it_is_the_new_one_that_runs() -> None:
    def num_messages(comm: collectives.Communicator) -> int:
        with comm.record() as ledger:
            comm.all_reduce(np.ones(4), algorithm="mine")
        return len(ledger.rows())

    for number, name in [(6, "ring"), (2, "recursive_doubling")]:
        entry = algorithms.info("all_reduce", name)
        pieces = {"pieces": str(entry.pieces)}

        @algorithms.register("all_reduce", name="mine", **pieces)
        def mine(rank: int, size: int, entry: Any = entry) -> Iterator[Round]:
            return entry.function(rank, size)

        assert collectives.run(num_messages, 4) == [number] * 4


def test_a_module_that_cannot_be_imported_is_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["--import", "no_such_module", "docs"])
    assert "cannot import no_such_module" in capsys.readouterr().err
