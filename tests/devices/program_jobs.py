"""Starts the jobs of programs (`programs.py`): one for many, and one for each that is on its own.

After a program that fails or hangs, those that follow run in another job.
"""

from __future__ import annotations

from functools import cached_property

from bench.commands.jobs import environment
from collectives.launch import launch
from tests.devices.programs import Programs
from tests.gpu.test_devices import Job, check, jobs_of

NUM_RANKS = 3
SECONDS = 400  # the time limit of a test that starts the job of many programs


class ProgramJobs:
    """The jobs of the programs of a file."""

    def __init__(self, file: str, programs: Programs) -> None:
        self._file, self._programs = file, programs

    def start(
        self,
        *words: str,
        num_ranks: int = NUM_RANKS,
        seconds: int = 80,
        fault_tolerant: bool = False,
        **variables: str,
    ) -> Job:
        """Run a program, or several, with arguments; `variables`: of the environment."""
        return launch(
            num_ranks,
            [self._file, *words],
            timeout=seconds,
            env=environment() | variables,
            capture=True,
            fault_tolerant=fault_tolerant,
        )

    @cached_property
    def of_many(self) -> dict[str, Job]:
        """By program, the job in which it ran with others."""
        names = [name for name in self._programs.by_name if name not in self._programs.alone]
        return jobs_of(NUM_RANKS, names, lambda left: self.start(*left, seconds=160), 200)

    def check(self, name: str, num_ranks: int = NUM_RANKS, **variables: str) -> None:
        """Raise AssertionError if a program is not right on all ranks, or its own job fails."""
        if name in self._programs.alone:
            done = self.start(name, num_ranks=num_ranks, **variables)
            assert done.returncode == 0, f"{name}\n{done.stdout}\n{done.stderr}"
        else:
            assert name in self.of_many, "no time was left, after others had failed"
            done = self.of_many[name]
        check(done, name, num_ranks)

    def check_end_of_many(self) -> None:
        """Raise AssertionError if a job of many programs fails, though they are right."""
        for done in self.of_many.values():
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
