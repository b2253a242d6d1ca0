"""A job that is not ended by MPI_Finalize leaves no files of shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.launch import launch

pytestmark = [pytest.mark.ranks(n=2), pytest.mark.slow]

PROGRAM = """
import os, pathlib, signal, sys, time
from mpi4py import MPI

lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
mapped = {line.split()[-1] for line in lines if "/dev/shm/" in line and "deleted" not in line}
print(*mapped, sep="\\n", flush=True)
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    {"killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "failed": lambda: sys.exit(3)}[
        sys.argv[1]
    ]()
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_no_shared_memory_is_left(how: str, tmp_path: Path) -> None:
    """MPICH itself leaves 3 MB of each such job."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = launch(2, [str(program), how], timeout=60, capture=True)
    files = {Path(line) for line in done.stdout.splitlines() if line.startswith("/dev/shm/")}
    assert done.returncode != 0 and files, done.stderr
    assert [path for path in files if path.exists()] == []
