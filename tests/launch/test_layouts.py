"""Layouts over MPI: predicted = recorded, and under Open MPI = observed, along every axis.

With experts, what is predicted follows from the routing of one rank.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.commands.jobs import environment
from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch import launch
from moe.train import COMMAND
from tests.launch.commands_program import BEGIN
from tests.launch.test_strategies import EQUAL, IS_OPEN_MPI

MODEL = (
    f"--text {argparse.__file__} --layers 2 --hidden 32 --heads 2 --context 32 --batch 16 --steps 3"
)
EXPERTS = "--experts 4 --moe-every 1"


class Layout(NamedTuple):
    """Words of the training program; one rank trains the same `model`."""

    ranks: str
    model: str = ""

    @property
    def has_experts(self) -> bool:
        return "--moe" in self.model


# Those of one job, on so many ranks.  Training sends the same calls on both MPIs, and only Open MPI
# counts them: .ci/run runs those of "4 ranks" on both.
JOBS: dict[str, tuple[int, list[Layout]]] = {
    "4 ranks": (
        4,
        [
            Layout("--mesh data=2,context=2 --attention ulysses --zero 2"),
            Layout(
                "--mesh expert=4 --padding needed --dispatch-parts 2", f"--moe gshard {EXPERTS}"
            ),
            Layout("--mesh context=2,expert=2", f"--moe expert-choice {EXPERTS}"),
            Layout(
                "--mesh pipe=2,expert=2 --schedule dualpipe-v",
                f"--moe switch {EXPERTS} --micro-batches 4",
            ),
        ],
    ),
    "more on 4 ranks": (
        4,
        [
            Layout(
                "--mesh pipe=4 --schedule dualpipe --micro-batches 16",
                "--tied --layers 4 --clip 0.1",
            ),
            Layout("--mesh data=2,expert=2 --zero 1", f"--moe switch {EXPERTS}"),
            Layout(
                "--mesh expert=4 --dispatch hierarchical --ranks-per-host 2 --zero 1",
                f"--moe stable {EXPERTS}",
            ),
        ],
    ),
    "8 ranks": (
        8,
        [
            Layout("--mesh pipe=2,context=2,tensor=2 --micro-batches 4 --zero 1", "--tied"),
            Layout(
                "--mesh pipe=2,data=2,tensor=2 --schedule zb-v --micro-batches 4 --zero 1"
                " --sequence-parallel"
            ),
            Layout("--mesh tensor=2,data=2,pipe=2 --micro-batches 4 --zero 1"),
            Layout(
                "--mesh pipe=2,expert=2,tensor=2 --micro-batches 2 --zero 1",
                f"--moe sigmoid {EXPERTS}",
            ),
            Layout(
                "--mesh pipe=2,expert=2,tensor=2 --zero 1 --schedule dualpipe",
                f"--moe switch {EXPERTS} --micro-batches 4",
            ),
        ],
    ),
}


def run(num_ranks: int, words: list[str], timeout: float) -> str:
    """What a program prints on these ranks."""
    done = launch(
        num_ranks,
        words,
        mpi_args=MPIRUN_ARGS if IS_OPEN_MPI else (),
        env=environment(),
        timeout=timeout,
        capture=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def run_commands(num_ranks: int, commands: list[str]) -> list[str]:
    """What each of these commands prints, which the same ranks run one after the other."""
    words = ["-m", "tests.launch.commands_program", *commands]
    before, *said = run(num_ranks, words, 100 * len(commands)).split(BEGIN)
    assert not before and [each.splitlines()[0] for each in said] == commands
    return said


def train(num_ranks: int, words: str, file: Path) -> tuple[str, list[float]]:
    """What the training program prints on these ranks, and its losses."""
    command = ["-m", "moe.train", *MODEL.split(), *words.split(), "--json", str(file)]
    return run(num_ranks, command, 100), losses_in(file)


def losses_in(file: Path) -> Any:
    return json.loads(file.read_text())["losses"]


def train_alone(layout: Layout, number: int, folder: Path) -> list[float]:
    """The losses of one rank, whose routing is kept in a file."""
    file, routing = folder / f"{number}.one.json", folder / f"{number}.routing.npz"
    keep = ["--save-routing", str(routing)] if layout.has_experts else []
    words = f"--threads 1 --strategy serial {MODEL} {layout.model} --json {file}"
    assert COMMAND.main([*words.split(), *keep]) == 0
    return list(losses_in(file))


def command_of(layout: Layout, number: int, folder: Path) -> str:
    """The training program on ranks, which predicts from the routing of one rank."""
    routing = f" --routing {folder}/{number}.routing.npz" if layout.has_experts else ""
    words = f"{MODEL} {layout.model} {layout.ranks}{routing}"
    program = "moe.train" if layout.has_experts else "parallel.train"
    return f"{program} {words} --json {folder}/{number}.json"


@pytest.mark.timeout(530)
@pytest.mark.parametrize(
    "job",
    [pytest.param(job, marks=() if job == "4 ranks" else pytest.mark.on_open_mpi) for job in JOBS],
)
@pytest.mark.ranks(n=8)
def test_what_is_sent_is_what_was_predicted(job: str, tmp_path: Path) -> None:
    """And the losses are those of one rank.

    Messages are too large to be buffered: a send waits for its receive.  In overlapping slots two
    threads take turns, and what MPI counts in each phase is as predicted although phases change
    with each turn.
    """
    num_ranks, layouts = JOBS[job]
    alone = [train_alone(layout, i, tmp_path) for i, layout in enumerate(layouts)]
    said = run_commands(num_ranks, [command_of(x, i, tmp_path) for i, x in enumerate(layouts)])
    for i, each in enumerate(said):
        assert EQUAL in each and "parameters: equal, to the bit" in each
        found = losses_in(tmp_path / f"{i}.json")
        assert found == pytest.approx(alone[i], rel=1e-12), layouts[i]


@pytest.mark.ranks(n=2)
@pytest.mark.slow
def test_a_schedule_that_computes_another_thing_than_one_rank_sends_what_was_predicted(
    tmp_path: Path,
) -> None:
    words = "--mesh pipe=2 --schedule pipedream --micro-batches 4"
    said, _ = train(2, words, tmp_path / "two.json")
    assert EQUAL in said and "parameters: equal, to the bit" in said
