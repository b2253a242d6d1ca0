"""Ranks that are processes read each other's GPU memory, in programs of `device_program.py`."""

from __future__ import annotations

import functools
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pytest

from bench.commands.jobs import environment
from bench.gpu.__main__ import no_mpi
from collectives.doctor.device_pointers import ways, why_refused
from collectives.launch import launch
from tests.gpu.device_program import PROGRAMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(no_mpi() is not None, reason="takes an MPI"),
    pytest.mark.timeout(230),  # beyond the time limit of a launch, which then says what hung
]
PROGRAM = str(Path(__file__).with_name("device_program.py"))


Job = subprocess.CompletedProcess[str]


def run(num_ranks: int, names: Sequence[str], place: str = "cupy") -> Job:
    command = [PROGRAM, place, *names]
    return launch(num_ranks, command, timeout=80, env=environment(), capture=True)


@functools.cache
def all_programs(num_ranks: int) -> dict[str, Job]:
    return jobs_of(num_ranks, PROGRAMS, partial(run, num_ranks))


def jobs_of(
    num_ranks: int, names: Iterable[str], run: Callable[[Sequence[str]], Job], seconds: float = 130
) -> dict[str, Job]:
    """The job in which each program ran.

    It is one for all, because its start takes longer than most programs; but after a program that
    fails, those that follow run in another one, which begins within `seconds`.
    """
    left, jobs = list(names), dict[str, Job]()
    end = time.monotonic() + seconds
    while left and time.monotonic() < end:
        done = run(left)
        wrong = (k for k, name in enumerate(left, 1) if not is_right(done, name, num_ranks))
        num_done = next(wrong, len(left))
        jobs |= dict.fromkeys(left[:num_done], done)
        left = left[num_done:]
    return jobs


def is_right(done: Job, name: str, num_ranks: int) -> bool:
    return done.stdout.count(f"{name} is right on rank") == num_ranks


def check(done: Job, name: str, num_ranks: int) -> None:
    said = f"{name} was not right on all ranks\n{done.stdout}\n{done.stderr}"
    assert is_right(done, name, num_ranks), said


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_right(name: str, num_ranks: int) -> None:
    jobs = all_programs(num_ranks)
    assert name in jobs, "no time was left, after others had failed"
    check(jobs[name], name, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_job_ends_well(num_ranks: int) -> None:
    for done in all_programs(num_ranks).values():
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_calls_that_turn_out_to_be_staged_are_right() -> None:
    check(run(3, ["staged_after_all"]), "staged_after_all", 3)


def test_mpi_sends_from_device_memory_if_it_can() -> None:
    refusals = [(way, why_refused(way)) for way in ways()]
    way = next((way for way, why in refusals if not why), None)
    if way is None:
        pytest.skip("; ".join(f"{way}: {why}" for way, why in refusals))
    command = [PROGRAM, "cupy", "direct_between_all_ranks"]
    env = {**environment(), **way.variables}
    done = launch(2, command, mpi_args=way.options, timeout=80, env=env, capture=True)
    check(done, "direct_between_all_ranks", 2)


def test_a_captured_stream_is_refused() -> None:
    check(run(2, ["captured_stream"]), "captured_stream", 2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_stream_that_stands_still_ends_the_wait_of_the_others(num_ranks: int) -> None:
    check(run(num_ranks, ["held_stream"]), "held_stream", num_ranks)
