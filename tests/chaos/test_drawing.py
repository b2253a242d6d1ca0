"""What is drawn is decided by the seed and the number of the job, and can happen."""

from __future__ import annotations

from tests.chaos.drawing import ALL, ENDING, FAULTS, Job, draw


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
