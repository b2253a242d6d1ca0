"""PyTorch's tensors on GPUs, in programs of `tests/torch/device_program.py`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.commands.jobs import environment
from bench.gpu.__main__ import no_mpi, torch_has_cuda
from collectives.launch import launch
from tests.gpu.test_devices import Job, check, jobs_of

if torch_has_cuda():
    from tests.torch.device_program import PROGRAMS, TRAINED

    NAMES = [*PROGRAMS, *TRAINED]
else:
    NAMES = []

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(no_mpi() is not None, reason="takes an MPI"),
    pytest.mark.skipif(not torch_has_cuda(), reason="takes PyTorch with CUDA"),
    pytest.mark.timeout(230),  # beyond the time limit of a launch, which then says what hung
]
NUM_RANKS = 2
PROGRAM = str(Path(__file__).parents[1] / "torch" / "device_program.py")


def run(names: Sequence[str]) -> Job:
    return launch(NUM_RANKS, [PROGRAM, *names], timeout=100, env=environment(), capture=True)


@functools.cache
def all_programs() -> dict[str, Job]:
    return jobs_of(NUM_RANKS, NAMES, run)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_right(name: str) -> None:
    assert name in all_programs(), "no time was left, after others had failed"
    check(all_programs()[name], name, NUM_RANKS)


def test_jobs_end_well() -> None:
    for done in all_programs().values():
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
