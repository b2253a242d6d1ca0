"""The moe command: its goals and tables, its contenders, and one quick run of it all."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from bench.__main__ import main
from bench.experts import dispatch_results
from bench.experts.dispatch_results import (
    FLAT,
    HIERARCHICAL,
    OURS,
    THEIRS,
    Bytes,
    Dispatched,
    JobResult,
    Sliced,
)
from bench.experts.dispatch_steps import (
    Alltoallv,
    Size,
    Steps,
    dispatcher_of,
    forward_of,
    gate_of,
    num_wrong,
    routed,
)
from docs.generate import experts

SIZE = Size(tokens=24, dim=5, num_experts=4)


def job_result(theirs: float = 2.0, parts: float = 1.0, hierarchical: int = 3) -> JobResult:
    return JobResult(
        4,
        [Dispatched("switch", {THEIRS: theirs, OURS: 1.0}, {OURS: 0}, 1.0)],
        [Sliced("gshard", {"1": 1.0, "2": 0.9, "4": parts})],
        [Bytes(gate, {FLAT: 4, HIERARCHICAL: hierarchical}) for gate in ("switch", "gshard")],
    )


def missed(job: JobResult) -> list[str]:
    return [goal.what for goal in dispatch_results.goals([job]) if not goal.is_met]


def test_goals_are_met_or_missed() -> None:
    """Where each token has one expert, no fewer bytes between hosts are demanded; else, fewer."""
    assert missed(job_result()) == []
    assert missed(job_result(theirs=1.2)) == ["switch on 4 ranks: Alltoallv / ours"]
    assert missed(job_result(parts=1.1)) == ["gshard on 4 ranks: one part / several"]
    assert missed(job_result(hierarchical=4)) == ["gshard on 4 ranks: bytes, flat / hierarchical"]


def test_a_job_that_failed_has_no_rows() -> None:
    assert JobResult.of(2, {}) == JobResult(2, [], [], [])
    titles = list(dispatch_results.tables([job_result()]))
    assert list(dispatch_results.tables([JobResult.of(2, {})])) == titles[:2]


@pytest.mark.parametrize("name", dispatch_results.GATES)
def test_both_contenders_add_copies_of_tokens(name: str) -> None:
    """And what is wrong in a result is counted."""
    comm, gate = collectives.wrap(MPI.COMM_SELF), gate_of(name, SIZE)
    x = np.random.default_rng(1).standard_normal((SIZE.tokens, SIZE.dim), np.float32)
    routings = [routed(gate, SIZE, 0, step) for step in range(2)]
    ours = forward_of(dispatcher_of("flat", comm, gate, SIZE))
    for forward in (ours, Alltoallv(MPI.COMM_SELF, gate.num_experts)):
        steps = Steps(forward, x, routings)
        for _ in routings:
            steps()
            assert num_wrong(steps) == 0
        steps.result[3] += 1
        assert num_wrong(steps) == SIZE.dim
        with pytest.raises(StopIteration):
            steps()
    comm.free()


def test_each_step_has_another_routing() -> None:
    gate = gate_of("switch", SIZE)
    first, again, second = (routed(gate, SIZE, 0, step).routing.expert for step in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != second).any()


@pytest.mark.slow
@pytest.mark.on_open_mpi
@pytest.mark.ranks(n=4)
def test_a_quick_run_measures_everything(tmp_path, capsys) -> None:
    path = tmp_path / "moe.json"
    assert main(["moe", "--quick", "--ranks", "4", "--json", str(path)]) == 0, capsys.readouterr()
    result = json.loads(path.read_text())
    (job,) = result["jobs"].values()
    job_result = JobResult.of(4, job)
    assert [case.gate for case in job_result.dispatched] == list(dispatch_results.GATES)
    assert [sent.gate for sent in job_result.hosts] == list(dispatch_results.GATES)
    assert not any(sum(case.wrong.values()) for case in job_result.dispatched)
    assert len(result["goals"]) == 3 + 1 + 2
    assert "Bytes between hosts" in capsys.readouterr().out
    check_table(path)


def check_table(path: Path) -> None:
    """The document has a line for each goal, and runs of other commits are refused."""
    result = experts.moe_result(str(path))
    lines = experts.moe_section([result, result]).splitlines()
    (line,) = [row for row in lines if row.startswith("| switch on 4 ranks: Alltoallv / ours")]
    assert line.split(" | ")[1] == "1.30" and line.count("|") == 5
    other = result | {"provenance": result["provenance"] | {"commit": "another"}}
    with pytest.raises(ValueError, match="not of the same commit"):
        experts.moe_section([result, other])
    with pytest.raises(ValueError, match="not of the same goals"):
        experts.moe_section([result, result | {"goals": []}])
    path.write_text("{}")
    with pytest.raises(argparse.ArgumentTypeError, match="was not written by python -m bench moe"):
        experts.moe_result(str(path))
