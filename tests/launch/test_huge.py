"""More elements and more bytes than a C int can count: 2^31 and a few, between two processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from collectives.launch import launch

pytestmark = [pytest.mark.ranks(n=2), pytest.mark.slow]

GIB = 2**30
NEEDED = 10 * GIB  # 7 for both ranks, and something for everybody else
ROOT = Path(__file__).parent.parent.parent

# The arrays hold the same bytes again and again, in a period that divides nothing, so that what
# must stand at a place is known without a second array.  Every step says how many places are wrong.
PROGRAM = """
import json
import numpy as np
import collectives

HALF, N, PERIOD = 2**30, 2**31 + 8, 1_000_003
comm = collectives.world()
random = np.random.default_rng(5)
own = random.integers(0, 256, (2, PERIOD), np.uint8)
greatest = own.max(axis=0)
anywhere = random.integers(0, N, 100_000)
edges = [np.arange(-4, 4) + edge for edge in (4, HALF, HALF + 4, 2**31, N - 4)]
places = np.concatenate([*edges, anywhere])

def say(step, wrong):
    print(json.dumps([step, comm.rank, int(wrong)]), flush=True)

def num_wrong(array, first, wanted):
    there = places[(places >= first) & (places < first + array.size)]
    return np.count_nonzero(array[there - first] != wanted[there % PERIOD])

x = np.empty(N, np.uint8)
for start in range(0, N, PERIOD):
    x[start : start + PERIOD] = own[comm.rank, : N - start]

part = comm.reduce_scatter(x, "max")
assert part.size == HALF + 4
wrong = num_wrong(part, comm.rank * part.size, greatest)
say("reduce_scatter", wrong + num_wrong(x, 0, own[comm.rank]))
del part

assert comm.all_reduce(x, "max", out=x) is x
say("all_reduce", num_wrong(x, 0, greatest))

message, rest = x[: 2**31 + 1], x[2**31 + 1 :]
if comm.rank == 0:
    comm.send(message, 1)
else:
    x.fill(0)
    comm.recv(message, 0)
    say("send and recv", num_wrong(message, 0, greatest) + np.count_nonzero(rest))

if comm.rank == 0:
    x.fill(0)
comm.broadcast(x, root=1)
say("broadcast", num_wrong(message, 0, greatest) + np.count_nonzero(rest))
"""


def memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    memory() < NEEDED, reason=f"needs {NEEDED // GIB} GiB of memory, here are {memory() / GIB:.1f}"
)
def test_more_bytes_than_an_int_can_count_are_sent(tmp_path: Path) -> None:
    script = tmp_path / "huge.py"
    script.write_text(PROGRAM)
    job = launch(2, [str(script)], timeout=100, env={"PYTHONPATH": str(ROOT)}, capture=True)
    assert job.returncode == 0, job.stderr
    assert sorted(map(json.loads, job.stdout.splitlines())) == [
        ["all_reduce", 0, 0],
        ["all_reduce", 1, 0],
        ["broadcast", 0, 0],
        ["broadcast", 1, 0],
        ["reduce_scatter", 0, 0],
        ["reduce_scatter", 1, 0],
        ["send and recv", 1, 0],
    ]
