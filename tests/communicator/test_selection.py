"""What runs when a call names no algorithm: as explained, as preferred, and as was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator, Operator, algorithms
from collectives.schedule.contracts import SPECS
from collectives.selection.decisions import Decisions, Measured, Ranks, Row
from collectives.selection.machine_file import Fitted
from collectives.simulation import Link, Machine

P = 3
MATMUL = Operator.from_function(lambda left, right: left @ right, name="matmul")
NUM_ROWS = [3, 12_000, 150_000]


def array_of(collective: str, num_rows: int) -> Any:
    return None if collective == "barrier" else np.zeros(num_rows, np.float32)


def call(comm: Communicator, collective: str, num_rows: int, **more: Any) -> None:
    x = array_of(collective, num_rows)
    getattr(comm, collective)(*[] if x is None else [x], **more)


def recorded(body: Callable[[Communicator], None], size: int = P) -> Any:
    """The whole ledger of `body(comm)`, as rank 0 gathers it."""

    def rank(comm: Communicator) -> Any:
        with comm.record() as ledger:
            body(comm)
        return ledger.gather()

    return collectives.run(rank, size)[0]


def labels(comm: Communicator, collective: str, body: Callable[[], Any]) -> list[str]:
    """The algorithms by which this rank sends something of the collective, in order."""
    with comm.record() as ledger:
        body()
    return list(dict.fromkeys(row[2] for row in ledger.rows() if row.collective == collective))


# Explaining


@pytest.mark.parametrize("collective", SPECS)
def test_what_is_explained_is_what_runs(collective: str) -> None:
    x = {num_rows: array_of(collective, num_rows) for num_rows in NUM_ROWS}
    for num_rows in NUM_ROWS:
        told = collectives.run(lambda comm, x=x[num_rows]: comm.explain(collective, x), P)
        assert told.count(told[0]) == P
        ledger = recorded(lambda comm, n=num_rows: call(comm, collective, n))
        algorithm = collectives.choose(collective, told[0].chosen, P, told[0].num_bytes)
        total = algorithm.algorithm.total_bytes(p=P, n=told[0].num_bytes, **algorithm.options)
        summary = ledger.summary(by=("collective", "algorithm"))
        assert summary[collective, told[0].chosen].bytes == total
        assert [key for key in summary if key[0] == collective] == [(collective, told[0].chosen)]


def test_every_algorithm_is_a_candidate_or_rejected() -> None:
    def body(comm: Communicator) -> Any:
        return comm.explain("all_reduce", np.zeros((4, 4)), op=MATMUL)

    told = collectives.run(body, P)[0]
    assert told.candidates == tuple(sorted(told.candidates, key=lambda each: each.seconds))
    assert all(each.seconds > 0 for each in told.candidates)
    names = [each.label for each in (*told.candidates, *told.rejected)]
    assert sorted(names) == sorted(collectives.algorithms.names("all_reduce"))
    rejected = dict(told.rejected)
    assert rejected["ring"] == "needs a commutative operator; matmul is not"
    assert rejected["swing"] == "serves an even number of ranks only, not 3"
    assert not set(rejected) & {"linear", "two_shot", told.chosen}


def test_an_explanation_reads_as_a_table() -> None:
    def body(comm: Communicator) -> str:
        with collectives.using(all_gather="bruck(radix=3)"):
            return str(comm.explain("all_gather", np.zeros(100, np.uint8)))

    lines = collectives.run(body, P)[0].splitlines()
    assert lines[:2] == [
        "all_gather of 300 bytes on 3 ranks: bruck(radix=3)",
        "why: named by collectives.using",
    ]
    assert lines[2] == "run by: the interpreter: the ranks are threads"
    assert [line.split()[1] for line in lines if line.startswith("*")] == ["bruck(radix=3)"]
    (swing,) = (line for line in lines if line.split()[0] == "swing")
    assert swing.endswith("serves an even number of ranks only, not 3")
    assert len(lines) == 4 + 1 + len(collectives.algorithms.names("all_gather"))


def test_the_reason_says_who_named_it() -> None:
    def body(comm: Communicator) -> list[str]:
        x = np.zeros(3)
        reasons = [comm.explain("all_reduce", x).reason]
        with collectives.using(all_reduce="linear"):
            reasons.append(comm.explain("all_reduce", x).reason)
            reasons.append(comm.explain("all_reduce", x, algorithm="linear").reason)
        return reasons

    told = ["built-in rule: up to 49152 bytes", "named by collectives.using", "named by the caller"]
    assert collectives.run(body, P)[0] == told


def test_explaining_sends_nothing() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:  # on one rank alone
            comm.explain("all_reduce", np.zeros(3))

    assert recorded(body).rows() == []


@pytest.mark.parametrize(
    ("error", "sentence", "collective", "x", "more"),
    [
        (ValueError, "unknown collective 'allreduce'", "allreduce", np.zeros(3), {}),
        (ValueError, "unknown algorithm 'rign'", "all_reduce", np.zeros(3), {"algorithm": "rign"}),
        (ValueError, "serves an even number", "all_reduce", np.zeros(3), {"algorithm": "swing"}),
        (
            ValueError,
            "needs a commutative operator",
            "all_reduce",
            np.zeros((2, 2)),
            {"algorithm": "ring", "op": MATMUL},
        ),
        (TypeError, "'xor' is not defined for dtype float64", "scan", np.zeros(3), {"op": "xor"}),
        (TypeError, "x must be", "all_reduce", None, {}),
    ],
)
def test_what_could_not_run_is_not_explained(
    error: type[Exception], sentence: str, collective: str, x: Any, more: dict[str, Any]
) -> None:
    with pytest.raises(error, match=sentence):
        collectives.run(lambda comm: comm.explain(collective, x, **more), P)


# Preferring


def test_calls_and_plans_take_what_is_preferred_unless_they_name_one() -> None:
    def body(comm: Communicator) -> list[str]:
        x, y = np.zeros(3), np.zeros(20_000)

        def calls() -> None:
            comm.all_reduce(x)
            with collectives.using(all_reduce="linear", all_gather="ring"):
                comm.all_reduce(x)  # small: a plan for it is kept already, by another algorithm
                comm.all_reduce(y, async_op=True).wait()
                comm.all_reduce(x, algorithm="ring")
                with collectives.using(all_reduce="census"):
                    comm.plan.all_reduce(x).run()
            comm.all_reduce(y)

        with comm.record() as ledger:
            calls()
        return list(dict.fromkeys(f"{row.call} {row.algorithm}" for row in ledger.rows()))

    by_call = [text.split()[1] for text in collectives.run(body, P)[2]]  # rank 2 always sends
    wanted = ["recursive_doubling", "linear", "linear", "ring", "census", "ring"]
    assert by_call == wanted


def test_what_the_library_sends_for_itself_keeps_to_its_own() -> None:
    def body(comm: Communicator) -> dict[str, list[str]]:
        def everything() -> None:
            comm.split(0)
            comm.broadcast(np.zeros(3))
            comm.all_to_all(np.zeros(3), counts=[1, 1, 1])
            comm.all_gather(np.zeros(3))

        found = {}
        for label in ("split", "counts", "header", "all_gather", "broadcast"):
            plain = labels(comm, label, everything)
            with collectives.using(all_gather="direct", broadcast="chain"):
                found[label] = plain + labels(comm, label, everything)
        return found

    found = collectives.run(body, P)[0]
    for label in ("split", "counts", "header"):
        assert len(found[label]) == 2 and len(set(found[label])) == 1, label
    assert found["all_gather"][1] == "direct" and found["broadcast"][1] == "chain"
    assert found["all_gather"][0] != "direct" and found["broadcast"][0] != "chain"


def test_what_is_preferred_but_cannot_serve_is_refused_as_if_it_were_named() -> None:
    def body(comm: Communicator) -> None:
        with collectives.using(all_reduce="swing"):
            comm.barrier()
            comm.all_reduce(np.zeros(3))

    with pytest.raises(ValueError, match="all_reduce by swing serves an even number of ranks"):
        collectives.run(body, P)
    collectives.run(body, 2)


# Decisions


def decisions(**tables: str) -> str:
    """As JSON: each collective is done by one algorithm."""
    rows = {name: [{"up_to": None, "best": [label]}] for name, label in tables.items()}
    measured = {str(P): {"facts": {}, "tables": rows}}
    return json.dumps({"machine": None, "measured": measured})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.json"


def test_what_was_measured_decides_where_it_was_loaded(path: Path) -> None:
    path.write_text(decisions(all_reduce="linear", all_gather="direct"))

    def body(comm: Communicator) -> Any:
        def by(group: Communicator) -> str:
            return labels(group, "all_reduce", lambda: group.all_reduce(np.zeros(3)))[0]

        before, older = by(comm), comm.subgroup(range(P))
        assert comm.decisions is None
        comm.load_decisions(path if comm.rank == 0 else "nowhere")  # rank 0 alone reads it
        assert comm.decisions is not None
        younger = comm.split(0)
        assert younger is not None
        told = comm.explain("all_reduce", np.zeros(3))
        return [before, *map(by, (comm, older, younger))], told

    for found, told in collectives.run(body, P)[1:]:  # rank 0 sends the result in either case
        assert found == ["recursive_doubling", "linear", "recursive_doubling", "linear"]
        assert told.reason == "table measured on 3 ranks: every size"


def test_a_call_and_a_block_override_what_was_measured(path: Path) -> None:
    path.write_text(decisions(all_reduce="linear"))

    def body(comm: Communicator) -> list[str]:
        comm.load_decisions(path)
        named = labels(comm, "all_reduce", lambda: comm.all_reduce(np.ones(3), algorithm="ring"))
        with collectives.using(all_reduce="census"):
            return named + labels(comm, "all_reduce", lambda: comm.all_reduce(np.ones(3)))

    assert collectives.run(body, P) == [["ring", "census"]] * P


def test_what_loading_sends_is_in_the_ledger(path: Path) -> None:
    path.write_text(decisions(all_reduce="linear"))
    ledger = recorded(lambda comm: comm.load_decisions(path))
    assert list(ledger.summary(by=("collective",))) == [("decisions",)]
    assert ledger.summary(by=())[()].bytes > (P - 1) * len('"all_reduce"')


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "No such file"),
        ("{", "decisions are not JSON"),
        ("{}", "decisions must have machine, measured, and nothing else"),
        (decisions(all_reduce="rign"), r"\[0\].best: unknown algorithm 'rign' for all_reduce"),
        (decisions(all_reduce="invariant(shards=4)"), r"\[0\].best: .* needs shards=4, and an x"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused_on_every_rank(
    content: str | None, sentence: str, path: Path
) -> None:
    if content is not None:
        path.write_text(content)

    def body(comm: Communicator) -> str:
        with pytest.raises(ValueError, match=sentence) as refused:
            comm.load_decisions(path)
        assert comm.decisions is None
        assert comm.all_reduce(np.ones(1))[0] == P, "nothing else has changed"
        return str(refused.value)

    said = collectives.run(body, P, timeout=20)
    assert said.count(said[0]) == P
    assert said[0].startswith(f"cannot load decisions from {path}: ")


# A fitted machine


def fitted(path: Path, **costs: float) -> Path:
    """A file with a machine of one link, and nothing measured."""
    machine = Machine({"same_host": (Link(**costs),)})
    path.write_text(Decisions({}, Fitted({}, machine)).to_json())
    return path


def test_predictions_choose_where_nothing_was_measured_and_are_the_reason(path: Path) -> None:
    """Where only start-ups cost time, one round is best; where only bytes do, fewer bytes are."""
    x = np.zeros(1024)

    def chosen(comm: Communicator, **costs: float) -> Any:
        comm.load_decisions(fitted(path, **costs) if comm.rank == 0 else "nowhere")
        told = comm.explain("all_reduce", x)
        assert labels(comm, "all_reduce", lambda: comm.all_reduce(x)) == [told.chosen]
        return told.reason, told.candidates[0]

    def body(comm: Communicator) -> Any:
        return chosen(comm, latency_seconds=1.0), chosen(comm, seconds_per_byte=1.0)

    first, *others = collectives.run(body, P)
    assert others == [first] * (P - 1), "all ranks choose alike"
    (reason, quick), (_, frugal) = first
    assert reason == "least time predicted on the fitted machine: above 4096 and up to 8192 bytes"
    assert quick.seconds == pytest.approx(1.0), "one message has a latency of a second"
    quick, frugal = (algorithms.info("all_reduce", each.label) for each in (quick, frugal))
    assert quick.startups(p=P, n=8192) <= frugal.startups(p=P, n=8192)
    assert quick.max_bytes_per_rank(p=P, n=8192) > frugal.max_bytes_per_rank(p=P, n=8192)


def test_a_table_comes_before_predictions_and_predictions_before_a_table_of_other_ranks(
    path: Path,
) -> None:
    machine = Machine({"same_host": (Link(latency_seconds=1.0),)})
    rows = {"all_reduce": (Row(math.inf, ("linear",)),)}
    for ranks, reason in ((P, "table measured on 3 ranks"), (P + 1, "least time predicted on")):
        measured = {Ranks(ranks): Measured({}, rows)}
        path.write_text(Decisions(measured, Fitted({}, machine)).to_json())

        def body(comm: Communicator) -> str:
            comm.load_decisions(path)
            return comm.explain("all_reduce", np.zeros(3)).reason

        assert all(said.startswith(reason) for said in collectives.run(body, P))
