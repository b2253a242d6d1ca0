"""Checkpoints of MPI jobs: one that is killed while it saves leaves what was there.

What needs no processes is in `tests/parallel/checkpoint/test_checkpoint.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch import launch
from collectives.launch.mpirun import defaults, find_mpirun
from parallel.checkpoint import latest
from tests.parallel.checkpoint.test_checkpoint import loaded, make, on_ranks, saved, state, whole

pytestmark = [pytest.mark.ranks(n=2), pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import os, signal, sys
from pathlib import Path
import collectives
from parallel import checkpoint
from tests.parallel.checkpoint.test_checkpoint import make

def at_last(file):
    if comm.rank == 1 and file.name.startswith("rank-1"):
        os.truncate(file, 1000)
        os.kill(os.getpid(), signal.SIGKILL)
    sync(file)

comm, root = collectives.world(), Path(sys.argv[1])
strategy = make(comm)
checkpoint.save(strategy, root, 1)
sync, checkpoint.sync = checkpoint.sync, at_last
checkpoint.save(strategy, root, 2)
"""


def test_a_rank_that_is_killed_while_saving_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """Rank 1 of an MPI job dies when a part of its file is written."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = tmp_path / "root"
    env = {"PYTHONPATH": str(ROOT)}
    done = launch(2, [str(program), str(root)], timeout=60, env=env, capture=True)
    assert done.returncode and "Rank 1 (process" in done.stderr, done.stderr
    assert (root / ".unfinished-step-00000002" / "rank-1-of-2.safetensors").stat().st_size == 1000
    assert latest(root) == root / "step-00000001"
    initial = on_ranks(2, lambda comm: state(make(comm)))
    assert whole(loaded(root / "step-00000001", 2)) == whole(initial)
    saved(root, 2, step=2)
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001", "step-00000002"]
    assert len([*(root / "step-00000002").iterdir()]) == 3


@pytest.mark.ranks(n=3)
def test_a_run_goes_on_with_its_traffic_watched(tmp_path: Path) -> None:
    """On other ranks and by another strategy; loading is part of what is predicted."""
    folder, is_open_mpi = str(tmp_path / "saved"), find_mpirun().vendor == "openmpi"
    small = ["--layers", "1", "--hidden", "8", "--heads", "2", "--context", "4", "--batch", "9"]
    words = ["-m", "parallel.train", "--text", __file__, "--dtype", "float16", *small]
    for ranks, more in (
        (3, ["--strategy", "zero2", "--steps", "2", "--save", folder]),
        (2, ["--strategy", "ddp", "--steps", "4", "--resume", folder]),
    ):
        done = launch(
            ranks,
            [*words, *more],
            timeout=60,
            env={"PYTHONPATH": str(ROOT)},
            capture=True,
            mpi_args=MPIRUN_ARGS if is_open_mpi else (),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "predicted = recorded" + " = observed" * is_open_mpi in done.stdout
    assert "continuing from step 2" in done.stdout


def test_what_fails_on_one_rank_ends_a_bare_job(tmp_path: Path) -> None:
    """Not through our launcher: mpirun itself, where nobody else would hear of it."""
    program = tmp_path / "program.py"
    program.write_text(FAILING)
    mpirun = find_mpirun()
    done = subprocess.run(
        [mpirun.path, "-n", "2", sys.executable, str(program)],
        env={**os.environ, **defaults(mpirun), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and "the disk is gone" in done.stderr


FAILING = """
import sys
import collectives
from parallel import text, train

batch, is_last = text.batch, collectives.world().rank == 1

def failing(data, *, step, **more):
    if is_last and step == 2:
        raise RuntimeError("the disk is gone")
    return batch(data, step=step, **more)

text.batch = failing
words = "--strategy zero3 --layers 1 --hidden 8 --heads 2 --context 4 --batch 8 --steps 9"
sys.exit(train.COMMAND.main([*words.split(), "--text", text.__file__]))
"""
