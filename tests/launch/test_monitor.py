"""MPI's own counters against what a small program sent, told apart message by message.

Only Open MPI has the counters.  On any other MPI each test holds what must be true there: that
their absence is said in a sentence.
"""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any

import pytest

from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch import launch
from collectives.launch.mpirun import find_mpirun

pytestmark = pytest.mark.ranks(n=3)

IS_OPEN_MPI = find_mpirun().vendor == "openmpi"

Seen = dict[str, Any]  # situation -> [messages, bytes] by destination, or an error's sentence

# Every rank sends to each rank, itself included, and says what the counters showed.  The sizes
# differ for each pair, so that no two mistakes cancel out.
PROGRAM = """
import json
import numpy
from mpi4py import MPI
from collectives.diagnostics.mpi_counters import Counters, MonitorUnavailable

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
other = world.Dup()

def to(peer):
    return numpy.zeros(1000 + 10 * rank + peer, numpy.uint8)

def everybody_sends(start):
    room = [numpy.zeros(2000, numpy.uint8) for _ in range(size)]
    requests = [other.Irecv(room[peer], peer) for peer in range(size)]
    requests += [start(to(peer), peer) for peer in range(size)]
    MPI.Request.Waitall([request for request in requests if request])

def persistent(data, peer):
    request = other.Send_init(data, peer)
    request.Start()
    kept.append((request, data))
    return request

kept, seen = [], {}
everybody_sends(other.Isend)        # before the counters are opened
try:
    counters = Counters(MPI._handleof(world), size)
except MonitorUnavailable as error:
    seen["unavailable"] = str(error)
else:
    def note(what):
        seen[what] = counters.read()

    note("opened")
    everybody_sends(other.Isend)
    note("Isend")
    everybody_sends(other.Send)
    note("Send")
    world.Barrier(), other.Barrier(), world.Dup().Free(), world.allgather(rank)
    world.Allreduce(numpy.zeros(10**5), numpy.zeros(10**5))
    note("MPI's own")
    other.Sendrecv(numpy.zeros(7, numpy.uint8), (rank + 1) % size, source=(rank - 1) % size,
                   recvbuf=numpy.zeros(7, numpy.uint8))
    note("an extra message")
    everybody_sends(persistent)
    for request, _ in kept:
        request.Free()
    note("persistent requests")
    second = Counters(MPI._handleof(world), size)
    second.close()
    second.close()
    everybody_sends(other.Isend)
    note("a second reader came and went")
    for name, handle, ranks in [
        ("another communicator", MPI._handleof(other), size),
        ("an address that is no handle", MPI._addressof(world), size),
        ("a wrong size", MPI._handleof(world), size + 1),
    ]:
        try:
            Counters(handle, ranks)
        except ValueError as error:
            seen[name] = str(error)
    counters.close()
print(json.dumps([rank, seen]))
"""


@functools.cache
def job(program: str, size: int, is_monitored: bool) -> subprocess.CompletedProcess[str]:
    mpi_args = MPIRUN_ARGS if IS_OPEN_MPI and is_monitored else ()
    return launch(size, [program], mpi_args=mpi_args, timeout=60.0, capture=True)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("monitor") / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def what_each_rank_saw(program: str, size: int, is_monitored: bool = True) -> list[Seen]:
    done = job(program, size, is_monitored)
    assert done.returncode == 0, done.stderr
    rows = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda row: row[0])
    assert [rank for rank, _ in rows] == list(range(size))
    seen = [what for _, what in rows]
    if not IS_OPEN_MPI:
        sentence = "only Open MPI has message counters, and this process uses another MPI"
        assert seen == [{"unavailable": sentence}] * size
    return seen


def sizes(rank: int, size: int, times: int = 1) -> list[int]:
    return [times * (1000 + 10 * rank + peer) for peer in range(size)]


on_both_sizes = pytest.mark.parametrize("size", [1, 3])


@on_both_sizes
def test_counters_equal_what_was_sent(program: str, size: int) -> None:
    """From zero on, whatever was sent before; Isend and Send alike; nothing of MPI's own."""
    for rank, seen in enumerate(what_each_rank_saw(program, size)):
        if IS_OPEN_MPI:
            assert seen["opened"] == [[0] * size, [0] * size]
            assert seen["Isend"] == [[1] * size, sizes(rank, size)]
            assert seen["Send"] == [[2] * size, sizes(rank, size, 2)]
            assert seen["MPI's own"] == seen["Send"]


@on_both_sizes
def test_an_extra_message_is_noticed(program: str, size: int) -> None:
    """The negative control: one message of seven bytes, to the right neighbour."""
    for rank, seen in enumerate(what_each_rank_saw(program, size)):
        if IS_OPEN_MPI:
            messages, nbytes = [2] * size, sizes(rank, size, 2)
            messages[(rank + 1) % size] += 1
            nbytes[(rank + 1) % size] += 7
            assert seen["an extra message"] == [messages, nbytes]


@on_both_sizes
def test_persistent_requests_escape_the_counters(program: str, size: int) -> None:
    """Open MPI's gap, held here so that the day it closes is noticed."""
    for seen in what_each_rank_saw(program, size):
        if IS_OPEN_MPI:
            assert seen["persistent requests"] == seen["an extra message"]


@on_both_sizes
def test_closing_one_reader_leaves_the_other_counting(program: str, size: int) -> None:
    for rank, seen in enumerate(what_each_rank_saw(program, size)):
        if IS_OPEN_MPI:
            before, after = seen["persistent requests"], seen["a second reader came and went"]
            assert [b - a for a, b in zip(before[0], after[0], strict=True)] == [1] * size
            assert [b - a for a, b in zip(before[1], after[1], strict=True)] == sizes(rank, size)


@on_both_sizes
def test_what_is_not_the_world_is_refused(program: str, size: int) -> None:
    for seen in what_each_rank_saw(program, size):
        if IS_OPEN_MPI:
            asked_for_world = "only COMM_WORLD has counters: pass MPI._handleof(MPI.COMM_WORLD)"
            assert seen["another communicator"] == asked_for_world
            assert seen["an address that is no handle"] == asked_for_world
            assert seen["a wrong size"] == f"COMM_WORLD has {size} ranks, not {size + 1}"


def test_unmonitored_open_mpi_says_how_to_switch_it_on(program: str) -> None:
    for seen in what_each_rank_saw(program, 1, is_monitored=False):
        if IS_OPEN_MPI:
            assert seen == {
                "unavailable": "Open MPI is not counting messages; version 5 or newer does if "
                "it is started with mpirun --mca pml_monitoring_enable 2"
            }
