"""Faults of fixed seeds are survived, and each thing that is done wrong on purpose is noticed.

``python -m tests.chaos`` draws more of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from collectives.launch.mpirun import find_mpirun
from tests.chaos.__main__ import Environment, run
from tests.chaos.drawing import ALL, ENDING, FAULTS, Job, Step, draw

HERE = Environment(sys.executable, find_mpirun().vendor, has_torch=False)
NUMBERS = (3, 10, 11) if HERE.vendor == "openmpi" else (4, 9)  # together they have 20 faults


def test_the_same_seed_draws_the_same_job_and_other_seeds_others() -> None:
    def drawn(seed: int, number: int) -> Job:
        return draw(seed, number, can_outlive=True, has_torch=True)

    jobs = [drawn(1, number) for number in range(300)]
    assert jobs == [drawn(1, number) for number in range(300)]
    assert len({str(job) for job in [*jobs, *map(drawn, [2] * 300, range(300))]}) == 600
    assert all(Job.from_json(job.to_json()) == job for job in jobs)
    steps = [step for job in jobs for step in job.steps]
    assert {step.fault for step in steps} == {*FAULTS}
    assert {step.workload for step in steps} == {*ALL}


def test_every_step_of_a_drawn_job_can_happen() -> None:
    for number in range(300):
        job = draw(3, number, can_outlive=number % 2 == 0, has_torch=False)
        for index, step in enumerate(job.steps):
            assert step.workload in FAULTS[step.fault].workloads and step.workload != "pytorch"
            assert step.guilty in set(range(job.size)) - job.dead_before(index)
            assert (step.fault in ENDING) <= (index == len(job.steps) - 1)
        assert job.size - len(job.dead_before(len(job.steps))) >= 2


@pytest.mark.parametrize("number", NUMBERS)
def test_twenty_faults_are_survived(number: int, tmp_path: Path) -> None:
    job = HERE.draw(1, number)
    outcome = run(job, tmp_path / "job")
    assert not outcome.verdicts, f"{job}\n" + "\n".join(map(str, outcome.verdicts))
    assert len(outcome.reached) == len(job.steps)


SABOTAGES = {
    "hang": ("no hang", "collectives", "stop"),
    "wrong value": ("values", "collectives", "stop"),
    "swallowed error": ("errors", "collectives", "late"),
    "left process": ("nothing left", "collectives", "stop"),
    "corrupted checkpoint": ("checkpoints", "training", "full disk"),
}


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_what_goes_wrong_on_purpose_is_noticed(sabotage: str, tmp_path: Path) -> None:
    """Negative controls: each breaks one promise, and the verdict is about that one."""
    promise, workload, fault = SABOTAGES[sabotage]
    job = Job("control", 2, (Step(workload, fault, 1, limit=0.2, sabotage=sabotage),))
    outcome = run(job, tmp_path / "job", hang_seconds=6.0)
    assert [verdict.promise for verdict in outcome.verdicts] == [promise]
    assert outcome.survived == []
