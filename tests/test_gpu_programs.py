"""The programs of the GPU tests are right themselves: here they run on the fake GPU.

Of the programs that make many calls, every eleventh call.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.jobs import environment
from collectives.launch import launch
from tests.gpu.device_program import ALONE, PROGRAMS

PROGRAM = str(Path(__file__).parent / "gpu" / "device_program.py")


@pytest.mark.timeout(130)
def test_every_program_is_right_on_the_fake_gpu() -> None:
    names = [*PROGRAMS, *ALONE]
    command = [PROGRAM, "fake", *names]
    done = launch(2, command, timeout=110, env=environment(), capture=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for name in names:
        assert done.stdout.count(f"{name} is right on rank") == 2
