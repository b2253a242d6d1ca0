"""Algorithms of the user's own: proved before they are entered, and then like any other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from bench.__main__ import main
from collectives import Communicator, ScheduleError, Topology, algorithms
from collectives.algorithms.algorithm import MAX_OPTION, MAX_PROVED
from collectives.algorithms.formulas import MAX_PIECES, MAX_ROUNDS
from collectives.algorithms.registry import generation
from collectives.schedule import Copy, Recv, RecvReduce, Round, Send
from collectives.selection import select
from collectives.selection.decisions import Decisions, Measured, Ranks
from collectives.selection.decisions import Row as Best
from docs.generate.__main__ import COMMAND as DOCS
from tests.algorithms.registry import registry_as_it_was


@pytest.fixture(autouse=True)
def _registry_as_it_was() -> Iterator[None]:
    with registry_as_it_was():
        yield


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
    assert str(entry.rounds) == "2 * (p - 1)" and str(entry.max_bytes_per_rank) == "counted"
    assert [entry.max_bytes_per_rank(p=p, n=10) for p in (1, 2, 3, 9)] == [0, 10, 20, 20]
    assert entry.total_bytes(p=9, n=10) == 160 and entry.reduction_bytes(p=9, n=10) == 10


def test_counting_takes_the_worst_root() -> None:
    @algorithms.register("broadcast", name="from_the_left")
    def star_or_line(rank: int, size: int, root: int) -> Iterator[Round]:
        if root == 0:
            return algorithms.info("broadcast", "linear").function(rank, size, root)
        rounds = algorithms.info("broadcast", "binomial").function(rank, size, root)
        return iter([*rounds, *[()] * (size - 1 - (size - 1).bit_length())])

    assert algorithms.info("broadcast", "from_the_left").max_bytes_per_rank(p=8, n=1) == 7


def test_a_registered_algorithm_has_its_place_in_grids_benchmarks_and_documents(
    tmp_path: Any,
) -> None:
    register_line()
    assert algorithms.grid("all_reduce", "line", size=2).splitlines() == [
        "rank  round 0  round 1",
        "0     >1:0     <1:0",
        "1     +0:0     >0:0",
    ]
    assert DOCS.main(["--root", str(tmp_path)]) == 0
    page = (tmp_path / "docs" / "algorithms" / "all_reduce.md").read_text()
    assert "## line\n\nAlong the line of ranks and back again." in page
    assert "| [line](#line) | counted |" in page


def test_options_are_proved_and_passed_on() -> None:
    @algorithms.register(
        "broadcast", options={"segments": 2}, pieces="N", total_bytes="(p - 1) * n"
    )
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


@pytest.mark.parametrize(
    ("operation", "sentence"),
    [
        (Send(1, [[0]]), r"send names \(\[0\],\) and \(\), which are not tuples of names"),
        (Copy([0], [{}]), r"copy names \(0,\) and \(\{\},\), which are no"),
        (Send(1, [0])._replace(blocks=None), r"send names None and \(\), which are no"),
    ],
)
def test_names_that_cannot_be_blocks_are_refused(operation: Any, sentence: str) -> None:
    def mine(rank: int, size: int) -> Iterator[Round]:
        yield (operation,)

    with pytest.raises(ScheduleError, match=sentence):
        algorithms.register("all_reduce")(mine)


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

    with pytest.raises(ValueError, match=r"max_bytes_per_rank is q \* n"):
        algorithms.register("broadcast", max_bytes_per_rank="q * n")(slow_from_two)


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
        ("all_reduce", {"rounds": "[1][p]"}, "list index out of range"),
        ("all_reduce", {"pieces": "3 / 2"}, "cuts into 3/2 pieces"),
        ("all_reduce", {"name": "my(line)"}, "identifier, not 'my\\(line\\)'"),
        ("all_reduce", {"options": {"segments": 2}}, "cannot be called with rank, size, segments"),
        ("all_reduce", {"options": {"segments": 0}}, "segments is at least 1"),
    ],
)
def test_what_cannot_be_registered_is_refused(
    collective: str, more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        algorithms.register(collective, **more)(line)


# What registration has not proved


def register_pipeline(is_right: Callable[[int, int], bool]) -> list[int]:
    """A pipeline that leaves out its last round unless `is_right(size, segments)`.

    The list gets the segments of every schedule that is made.
    """
    made: list[int] = []

    @algorithms.register("broadcast", name="mine", options={"segments": 2}, pieces="N")
    def mine(rank: int, size: int, root: int, segments: int = 2) -> Iterator[Round]:
        made.append(segments)
        rounds = [*algorithms.info("broadcast", "pipeline").function(rank, size, root, segments)]
        return iter(rounds if is_right(size, segments) else rounds[:-1])

    return made


def refused(size: int, num_elements: int, algorithm: str = "mine") -> list[str]:
    """What each rank is told that makes the call; it must have sent nothing."""

    def body(comm: collectives.Communicator) -> str:
        x = np.zeros(num_elements, np.float32)
        with comm.record() as ledger, pytest.raises((ScheduleError, ValueError)) as error:
            comm.broadcast(x, out=x, algorithm=algorithm, timeout=20)
        assert ledger.rows() == []
        return str(error.value)

    return collectives.run(body, size, timeout=60)


def test_segments_that_the_library_chooses_are_proved_before_they_are_used() -> None:
    register_pipeline(lambda size, segments: segments <= 4)
    told = refused(3, 2_000_000)
    assert told[0].startswith("broadcast.mine, 3 ranks, root 0, segments=32: rank 2, round ")
    assert len(set(told)) == 1


def test_options_that_a_caller_gives_are_proved_before_they_are_used() -> None:
    register_pipeline(lambda size, segments: segments != 7)
    assert "segments=7: rank 1, round " in refused(2, 100, "mine(segments=7)")[1]


def test_a_number_of_ranks_that_was_not_proved_is_proved_before_it_is_used() -> None:
    register_pipeline(lambda size, segments: size <= 17)
    told = refused(18, 100)
    assert told[0].startswith("broadcast.mine, 18 ranks, root 0, segments=1: rank 17, round ")
    assert len(set(told)) == 1


def test_a_function_that_raises_on_one_rank_is_refused_by_all() -> None:
    @algorithms.register("broadcast", name="mine", options={"segments": 2}, pieces="N")
    def mine(rank: int, size: int, root: int, segments: int = 2) -> Iterator[Round]:
        turns = {number: number for number in range(9 if rank == 1 else 99)}
        turns[segments]
        yield from algorithms.info("broadcast", "pipeline").function(rank, size, root, segments)

    told = refused(2, 100, "mine(segments=9)")
    assert len(set(told)) == 1
    assert told[0].endswith("segments=9: rank 1 of 2 raises KeyError: 9")


def test_what_a_function_raises_is_told_with_the_rank_on_registration() -> None:
    def mine(rank: int, size: int) -> Iterator[Round]:
        yield from line(rank, size) if size < 4 else [()][rank]

    with pytest.raises(ScheduleError, match=r"rank 1 of 4 raises IndexError: list index"):
        algorithms.register("all_reduce")(mine)


def test_a_right_schedule_is_proved_once_and_then_runs() -> None:
    made = register_pipeline(lambda size, segments: True)

    def body(comm: collectives.Communicator) -> bool:
        x = np.full(50_000, comm.rank, np.float32)
        comm.broadcast(x, root=1, out=x, algorithm="mine(segments=9)")
        return bool((x == 1).all())

    assert collectives.run(body, 3) == [True] * 3
    num_made = made.count(9)
    algorithms.schedule("broadcast", "mine", rank=0, size=3, root=1, segments=9)
    assert made.count(9) == num_made + 1  # the schedule itself, and no proof
    algorithms.schedule("broadcast", "mine", rank=0, size=3, root=2, segments=9)
    assert made.count(9) > num_made + 3


def test_the_library_chooses_few_numbers_of_segments_for_a_registered_algorithm() -> None:
    register_pipeline(lambda size, segments: True)
    mine, pipeline = (algorithms.info("broadcast", name) for name in ("mine", "pipeline"))

    def segments(size: int) -> set[int]:
        every = range(0, 2**28, 2**18)
        return {select.options(mine, size, num_bytes)["segments"] for num_bytes in every}

    assert segments(4) == {2**k for k in range(9)}
    assert max(segments(1000)) == 16 and max(segments(100_000)) == 1
    assert select.options(pipeline, 100_000, 2**28) == {"segments": 256}


def test_a_schedule_too_long_to_be_proved_is_refused() -> None:
    register_line()
    assert len(algorithms.schedule("all_reduce", "line", rank=0, size=200)) == 398
    with pytest.raises(
        ValueError, match=rf"all_reduce.line on 2000 ranks with \{{\}} has more than {MAX_PROVED}"
    ):
        algorithms.schedule("all_reduce", "line", rank=0, size=2000)


@pytest.mark.parametrize("endless", [(), (Send(1, [0]),)])
def test_a_function_that_never_ends_is_refused(endless: Round) -> None:
    def mine(rank: int, size: int) -> Iterator[Round]:
        return itertools.repeat(endless)

    with pytest.raises(ValueError, match=f"all_reduce.mine has more than {MAX_ROUNDS} rounds"):
        algorithms.register("all_reduce")(mine)


def test_counting_ends_as_well() -> None:
    @algorithms.register("all_reduce")
    def mine(rank: int, size: int) -> Iterator[Round]:
        return line(rank, size) if size < 20 else itertools.repeat(())

    with pytest.raises(ValueError, match=f"more than {MAX_ROUNDS} rounds"):
        algorithms.info("all_reduce", "mine").rounds(p=20)


def test_more_pieces_than_anybody_needs_are_refused() -> None:
    with pytest.raises(
        ValueError, match=f"all_reduce.line cuts into more than {MAX_PIECES} pieces"
    ):
        register_line(pieces="2**40")


@pytest.mark.parametrize("text", ["pipeline(segments=99999999999)", "knomial(radix=99999999999)"])
def test_option_values_that_are_too_large_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"is at most {MAX_OPTION}, got 99999999999"):
        select.choose("broadcast", text, 4, 8)


def test_a_number_of_too_many_digits_is_refused() -> None:
    with pytest.raises(ValueError, match="algorithm 'pipeline': segments is too large"):
        select.choose("broadcast", f"pipeline(segments={'9' * 5000})", 4, 8)


def test_an_option_that_is_no_int_is_called_that() -> None:
    with pytest.raises(ValueError, match=r"segments must be an int, not 2.0"):
        algorithms.schedule("broadcast", "pipeline", rank=0, size=2, segments=2.0)  # type: ignore[arg-type]


def test_a_built_in_schedule_of_too_many_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match=f"segmented_ring has more than {MAX_ROUNDS} rounds"):
        algorithms.schedule("all_reduce", "segmented_ring", rank=0, size=15, segments=2**16)


def test_the_grid_of_a_long_schedule_shows_the_rounds_around_the_wrong_one() -> None:
    register_pipeline(lambda size, segments: segments < 200)
    with pytest.raises(ScheduleError) as error:
        algorithms.verify("broadcast", "mine", 4, segments=200)
    assert "[" in str(error.value) and len(str(error.value)) < 4000


# Registering again


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


def test_a_name_may_be_registered_again_by_another_function_of_the_user() -> None:
    algorithms.register("all_reduce", name="mine")(algorithms.info("all_reduce", "census").function)
    register_line(name="mine")
    assert algorithms.info("all_reduce", "mine").function.__name__ == "line"


def test_a_built_in_algorithm_is_never_replaced() -> None:
    ring = algorithms.info("all_reduce", "ring")
    with pytest.raises(ValueError, match="'ring' already, which is built in; choose another name"):
        algorithms.register("all_reduce", name="ring")(ring.function)
    assert algorithms.info("all_reduce", "ring") is ring


def test_a_refused_registration_leaves_the_earlier_one() -> None:
    register_line()
    before = algorithms.info("all_reduce", "line"), generation()
    with pytest.raises(ValueError, match="rounds is"):
        register_line(rounds="p - 1")
    assert (algorithms.info("all_reduce", "line"), generation()) == before


def test_the_generation_grows_with_every_registration() -> None:
    generations = [generation()]
    for _ in range(3):
        register_line()
        generations.append(generation())
    assert generations == sorted(set(generations))


def test_measured_decisions_name_the_algorithm_that_was_registered_last() -> None:
    tables = {"all_reduce": (Best(math.inf, ("line",)),)}
    decisions = Decisions({Ranks(4): Measured({}, tables)})
    for _ in range(2):
        register_line()
        chosen = select.choose("all_reduce", None, 4, 8, None, decisions)
        assert chosen.algorithm is algorithms.info("all_reduce", "line")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "ModuleNotFoundError: No module named 'some_module'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def (", "SyntaxError: invalid syntax"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused(
    text: str | None, sentence: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    if text is not None:
        (tmp_path / "some_module.py").write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["--import", "some_module", "all_reduce"])
    assert stop.value.code == 2
    assert f"cannot import some_module: {sentence}" in capsys.readouterr().err


# Hosts


def leaders(rank: int, size: int, hosts: Topology) -> Iterator[Round]:
    """Every rank sends its vector to the first rank of its host, and these to rank 0, and back."""
    mates, others = hosts.mates(rank), [ranks[0] for ranks in hosts.hosts[1:]]
    for leader, members in ((mates[0], mates[1:]), (0, others)):
        receives = tuple(RecvReduce(member, [0], "right") for member in members)
        yield receives if rank == leader else (Send(leader, [0]),) if rank in members else ()
    for leader, members in ((0, others), (mates[0], mates[1:])):
        sends = tuple(Send(member, [0]) for member in members)
        yield sends if rank == leader else (Recv(leader, [0]),) if rank in members else ()


def test_an_algorithm_that_knows_hosts_gets_those_of_the_communicator() -> None:
    algorithms.register(
        "all_reduce", options={"per_host": 2}, messages="2 * (p - 1)", is_bitwise=True
    )(leaders)

    def sent(comm: Communicator) -> Any:
        x = np.full(3, comm.rank + 1.0)
        with comm.record() as ledger:
            assert comm.all_reduce(x, algorithm="leaders").tolist() == [21.0] * 3
        whole = ledger.gather()
        return whole and whole.host_matrix().tolist()

    # Each of two other hosts sends its sum to the first one, and gets the result.
    between_hosts = collectives.run(sent, 6, topology=Topology("abbacc"))[0]
    assert between_hosts[0][1:] == [24, 24] and [row[0] for row in between_hosts[1:]] == [24, 24]
    assert between_hosts[1][2] == between_hosts[2][1] == 0
    assert collectives.run(sent, 6)[0] == [[10 * 24]]
