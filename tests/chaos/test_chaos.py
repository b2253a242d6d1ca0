"""Faults of every kind are survived, and what is done wrong on purpose is noticed.

``python -m tests.chaos`` draws more of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from collectives.launch.mpirun import find_mpirun
from tests.chaos import injecting
from tests.chaos.__main__ import Environment, run
from tests.chaos.drawing import ENDING, FAULTS, SURVIVED, Job, Step

# Each step of a job has its own limit, and is reported.
pytestmark = [pytest.mark.timeout(400), pytest.mark.ranks(n=4)]

HERE = Environment(sys.executable, find_mpirun().vendor, has_torch=False)
# One job for each end, with all kinds of faults before it; and one that is drawn: on Open MPI ranks
# die in it, and the others go on.
JOBS = {
    "kill": Job(
        "kill",
        3,
        (
            Step("collectives", "stop", 2, delay=0.01, duration=0.2),
            Step("plans", "slow", 1, duration=0.2),
            Step("asynchronous", "dump", 0, duration=0.05, choice=14),
            Step("sub-communicators", "late", 1, limit=0.2),
            Step("checked", "mismatch", 2, choice=3),
            Step("collectives", "kill", 1, delay=0.05),
        ),
    ),
    "ctrl-c": Job(
        "ctrl-c",
        4,
        (
            Step("plans", "stop past limit", 3, delay=0.01, limit=0.2),
            Step("asynchronous", "short limits", 0),
            Step("checked", "refused", 2, choice=3),
            Step("collectives", "interrupt", 1, delay=0.05, limit=0.2),
            Step("training", "ctrl-c", 0, delay=0.05),
        ),
    ),
    "exception": Job(
        "exception",
        2,
        (
            Step("plans", "operator", 1, limit=0.2),
            Step("checked", "not finite", 0),
            Step("training", "full disk", 1, choice=500),
            Step("collectives", "operator", 0, limit=0.2),
            Step("asynchronous", "exception", 0, delay=0.05),
        ),
    ),
    "job limit": Job("job limit", 2, (Step("sub-communicators", "job limit", 1, delay=0.02),)),
    "drawn": HERE.draw(1, 9),
}


def test_twenty_faults_of_every_kind_are_in_the_jobs() -> None:
    steps = [step for job in JOBS.values() for step in job.steps]
    assert len(steps) >= 20
    kinds = FAULTS if HERE.vendor == "openmpi" else SURVIVED | ENDING
    assert {step.fault for step in steps} == set(kinds)


@pytest.mark.parametrize("name", JOBS)
def test_faults_are_survived(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    outcome = run(job, tmp_path / "job")
    assert not outcome.verdicts, f"{job}\n" + "\n".join(map(str, outcome.verdicts))
    assert len(outcome.reached) == len(job.steps)


# Negative controls.  `test_judging.py` has one for everything that is judged, without a job.


@pytest.mark.on_open_mpi
def test_a_hang_on_purpose_is_noticed(tmp_path: Path) -> None:
    job = Job("hang", 2, (Step("collectives", "stop", 1, sabotage="hang"),))
    outcome = run(job, tmp_path / "job", hang_seconds=5.0)
    (verdict,) = outcome.verdicts
    assert verdict.promise == "no hang" and "waited in vain for the end" in verdict.sentence
    assert outcome.survived == []


@pytest.mark.on_open_mpi
def test_what_goes_wrong_on_purpose_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step breaks one promise, and the verdict is about that one."""
    monkeypatch.setattr(injecting, "GONE_SECONDS", 4.0)  # the process that is left never goes
    steps = (
        Step("collectives", "stop", 1, sabotage="wrong value"),
        Step("collectives", "late", 1, limit=0.2, sabotage="swallowed error"),
        Step("training", "full disk", 1, sabotage="corrupted checkpoint"),
        Step("collectives", "stop", 1, sabotage="left process"),
    )
    outcome = run(Job("control", 2, steps), tmp_path / "job")
    found = [(verdict.step, verdict.promise) for verdict in outcome.verdicts]
    assert sorted(found) == [(0, "values"), (1, "errors"), (2, "checkpoints"), (3, "nothing left")]
    assert outcome.survived == []
