"""The programs of the GPU tests are right themselves: here they run on the fake GPU.

Of the programs that make many calls, every eleventh call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pytest

from bench.commands.jobs import environment
from collectives.communicator.probing import KNOWN
from collectives.launch import launch
from tests.gpu.device_program import ALONE, PROGRAMS
from tests.gpu.test_devices import Job, is_right, jobs_of

PROGRAM = str(Path(__file__).parents[1] / "gpu" / "device_program.py")


def test_programs_after_one_that_fails_run_in_another_job() -> None:
    started: list[list[str]] = []

    def run(names: Sequence[str]) -> Job:
        started.append(list(names))
        right = takewhile(lambda name: not name.startswith("wrong"), names)
        said = "".join(f"{name} is right on rank {rank}\n" for name in right for rank in range(2))
        return Job([], len(started), said, "")

    jobs = jobs_of(2, ["a", "wrong b", "c", "wrong d"], run)
    assert started == [["a", "wrong b", "c", "wrong d"], ["c", "wrong d"]]
    assert [jobs[name].returncode for name in ("a", "wrong b", "c", "wrong d")] == [1, 1, 2, 2]
    right = [is_right(jobs[name], name, 2) for name in ("a", "wrong b", "c", "wrong d")]
    assert right == [True, False, True, False]


@pytest.mark.timeout(130)
@pytest.mark.parametrize("place", ["fake", "kernels on fake"])
@pytest.mark.ranks(n=2)
@pytest.mark.on_open_mpi
@pytest.mark.slow
def test_every_program_is_right_on_the_fake_gpu(place: str) -> None:
    names = [*PROGRAMS, *ALONE]
    command = [PROGRAM, place, *names]
    env = {**environment(), KNOWN: "1"}  # the fake GPU's memory is memory of the host
    done = launch(2, command, timeout=110, env=env, capture=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for name in names:
        assert done.stdout.count(f"{name} is right on rank") == 2
