"""Every strategy over MPI: predicted = recorded, and under Open MPI = observed.

`strategies_program.py` runs them one after the other in the same processes, each as the training
program does.
"""

from __future__ import annotations

import pytest

from bench.commands.jobs import environment
from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch import launch
from collectives.launch.mpirun import find_mpirun
from parallel.commands.presets import STRATEGIES
from tests.launch.strategies_program import EXACT, ROUNDED

IS_OPEN_MPI = find_mpirun().vendor == "openmpi"
# Beyond the time limit of a launch.
pytestmark = [pytest.mark.timeout(270), pytest.mark.ranks(n="num_ranks"), pytest.mark.slow]

EQUAL = (
    "predicted = recorded = observed by MPI, to the byte"
    if IS_OPEN_MPI
    else "predicted = recorded, to the byte (two columns compared: MPI was not observed)"
)
DIFFERENT = "predicted, recorded and observed differ:"
UNPREDICTED = (
    "(outside every phase)/send: predicted 0 calls, 0 messages, 0 bytes; recorded 1 messages"
)
UNRECORDED = "recorded 0 calls, 0 messages, 0 bytes; observed 1 messages, 5 bytes"


def test_all_strategies_are_there() -> None:
    """But the one that needs no other rank, and the one that needs fault tolerance."""
    run = {words.split()[0] for words in (*EXACT, *ROUNDED)}
    assert run == set(STRATEGIES) - {"serial", "elastic"}


# Training sends the same calls on both MPIs, and only Open MPI counts them.
@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(2, marks=pytest.mark.on_open_mpi),
        3,
        pytest.param(8, marks=pytest.mark.on_open_mpi),
    ],
)
def test_every_strategy_sends_and_keeps_what_it_says_and_trains_as_one_rank(num_ranks: int) -> None:
    """Parameters of all ranks are equal, too.  In the end messages that nobody said are noticed."""
    run_every_strategy(num_ranks)


def run_every_strategy(num_ranks: int, *options: str) -> None:
    """With these options of the training program."""
    done = launch(
        num_ranks,
        ["-m", "tests.launch.strategies_program", *options],
        mpi_args=MPIRUN_ARGS if IS_OPEN_MPI else (),
        env=environment(),
        timeout=250,
        capture=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    num_strategies = len(EXACT) + len(ROUNDED)
    assert lines[:num_strategies] == [
        *(f"{words}: {EQUAL}; losses of one rank" for words in EXACT),
        *(f"{words}: {EQUAL}" for words in ROUNDED),
    ]
    unpredicted, said, *rest = lines[num_strategies:]
    assert unpredicted == f"unpredicted: {DIFFERENT}" and said.startswith(UNPREDICTED)
    assert rest[0] == "messages without axis: the matrix predicted is not the one recorded"
    unrecorded, *rest = rest[[line.startswith("unrecorded") for line in rest].index(True) :]
    if IS_OPEN_MPI:
        assert unrecorded == f"unrecorded: {DIFFERENT}" and rest[0].endswith(UNRECORDED)
        outside = "phase (outside every phase): the matrix predicted is not the one observed"
        assert rest[1:] == [outside]
    else:  # only MPI itself could tell
        assert unrecorded == f"unrecorded: {EQUAL}" and not rest
