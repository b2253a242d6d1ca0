"""The strategies command: its arithmetic, what it takes for too far, and one small run."""

from __future__ import annotations

import argparse
import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from bench.__main__ import main
from bench.training import strategies
from bench.training.strategies import BATCH, KINDS, Strategies, costs, distance, numbers, refuse
from collectives.console import Refused
from collectives.launch.mpirun import MpiNotFound, find_mpirun
from parallel.commands.presets import STRATEGIES
from parallel.commands.training import check_batch
from tests.bench.parsing import parsed

IS_OPEN_MPI = find_mpirun().vendor == "openmpi"
TEXT = argparse.__file__


# Words


def test_numbers_are_read_from_text():
    assert numbers("4") == (4,)
    assert numbers("1,2,8") == (1, 2, 8)
    with pytest.raises(argparse.ArgumentTypeError, match="'x' is not a whole number"):
        numbers("2,x")


def test_what_is_not_a_number_or_a_strategy_is_refused(capsys):
    for words in (
        ["--ranks", "2,x"],
        ["--ranks", "0"],
        ["--ranks", "2,-1"],
        ["--micro-batches", "0"],
        ["--only", "zero4"],
        ["--layers", "x"],
        ["--hidden", "0"],
    ):
        with pytest.raises(SystemExit):
            parsed(["strategies", *words])
        assert f"argument {words[0]}" in capsys.readouterr().err


def test_a_batch_that_cannot_be_divided_is_refused_before_any_job(monkeypatch, capsys):
    """It names the ranks for which there are too few rows, and no others."""
    monkeypatch.setattr("bench.training.strategies.starting_jobs", None)  # cannot be made
    with pytest.raises(SystemExit) as stop:
        main(["strategies", "--ranks", "1,2,8", "--micro-batches", "12"])
    assert stop.value.code == 2
    wanted = "a global batch of 19 cannot be divided among 2, 8 ranks with 12 micro-batches each"
    assert wanted in capsys.readouterr().err


def test_a_width_that_the_heads_do_not_divide_is_refused_before_any_job(monkeypatch, capsys):
    monkeypatch.setattr("bench.training.strategies.starting_jobs", None)  # cannot be made
    with pytest.raises(SystemExit) as stop:
        main(["strategies", "--hidden", "31"])
    assert stop.value.code == 2
    assert "4 heads do not divide a width of 31" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 19, 20])
@pytest.mark.parametrize("parts", [1, 2, 6, 9, 10, 19, 20])
def test_what_is_refused_is_what_every_job_would_refuse(ranks, parts):
    """No more and no less: at the last number that is possible, too, and the first that is not."""
    words = ["strategies", "--ranks", str(ranks), "--micro-batches", str(parts)]
    options = SimpleNamespace(batch=BATCH, micro_batches=parts, mesh=None, context=1)
    ours = fails(Refused, refuse, parsed(words))
    assert ours == fails(ValueError, check_batch, options, ranks)


def fails(failure, function, *arguments):
    try:
        function(*arguments)
    except failure:
        return True
    return False


def test_every_strategy_is_there_that_needs_no_fault_tolerance():
    named = {kind.words[1] for kind in KINDS}
    assert named == set(STRATEGIES) - {"serial", "elastic"}
    assert len({kind.name for kind in KINDS}) == len(KINDS)


# Costs


def matrix(links):
    """Of four ranks: the bytes of each link (from, to)."""
    made = np.zeros((4, 4), int)
    for (src, dst), nbytes in links.items():
        made[src, dst] = nbytes
    return made.tolist()


def ring(nbytes):
    """Every rank sends to the next one; half of that leaves the pairs 0, 1 and 2, 3."""
    return matrix({(rank, (rank + 1) % 4): nbytes for rank in range(4)})


def doubling(nbytes):
    """Every rank exchanges with the other one of its pair, then with one of the other pair."""
    return matrix({(rank, rank ^ bit): nbytes for rank in range(4) for bit in (1, 2)})


STAR = matrix({(0, rank): 999 for rank in (1, 2, 3)})  # two of its three links leave the pairs


def result(**changes):
    """Of 100 parameters on 4 ranks in 5 steps of 2 seconds in all."""
    made = {
        "parameters": 100,
        "ranks": 4,
        "steps": 5,
        "seconds": 2.0,
        "seconds_per_step": 0.3,
        "traffic": {
            "matrices": {
                "start": STAR,
                "backward": ring(1000),
                "loss": doubling(50),
                "finish": STAR,
            }
        },
        "ranks_kept": [
            {
                "parameters": [0, 200],
                "gradients": [0, 100],
                "optimizer": [0, 60],
                "master": [0, 40],
                "activations": [0, 10**6],
                "buffers": [0, 10**6],
            },
            {"parameters": [0, 200], "optimizer, elsewhere": [0, 500]},
            {"parameters": [0, 300], "master, elsewhere": [0, 200], "buffers, elsewhere": [0, 9]},
            {"gradients": [0, 0]},
        ],
    }
    return made | changes


def test_costs_are_of_one_rank_in_one_step():
    """4400 bytes in steps: 220 of a rank in a step, over 400; 1600 bytes kept: 400, over 1600."""
    assert costs(result()) == (220 / 400, 110 / 400, 400 / 1600, 700 / 1600, 300.0)


def test_what_stays_in_a_group_does_not_leave_it():
    pairs = matrix({(0, 1): 7, (1, 0): 7, (2, 3): 7, (3, 2): 7})
    cost = costs(result(traffic={"matrices": {"start": STAR, "forward": pairs}}))
    assert (cost.sent, cost.between) == (28 / (5 * 4 * 400), 0)


@pytest.mark.parametrize("once", ["start", "finish"])
def test_what_is_sent_once_does_not_count(once):
    """However much that is; in a phase of any other name it does."""
    matrices = result()["traffic"]["matrices"]
    same = costs(result(traffic={"matrices": matrices | {once: ring(10**6)}}))
    assert same == costs(result())
    more = costs(result(traffic={"matrices": matrices | {f"{once}ed": ring(2000)}}))
    assert (more.sent, more.between) == (620 / 400, 310 / 400)


def test_one_rank_sends_nothing():
    cost = costs(result(ranks=1, traffic={"matrices": {}}))
    assert (cost.sent, cost.between) == (0, 0)


def test_data_parallelism_costs_what_the_paper_says():
    """2 Psi (p-1)/p elements of two bytes in a step, half of them out of pairs; 16 Psi of memory.

    What the broadcast of initial values adds to the whole run leaves the pairs in another measure.
    """
    p, psi, steps = 4, 100, 5
    kept = {
        "parameters": [0, 200],
        "gradients": [0, 200],
        "optimizer": [0, 800],
        "master": [0, 400],
    }
    sent = ring(steps * 2 * (p - 1) * 2 * psi // p)
    cost = costs(
        result(traffic={"matrices": {"start": STAR, "backward": sent}}, ranks_kept=[kept] * p)
    )
    assert (cost.sent, cost.between) == ((p - 1) / p, 0.375)
    assert (cost.kept, cost.most) == (1.0, 1.0)


# Distances


def losses(*values):
    return {"losses": list(values)}


def test_distance_is_relative_and_the_largest():
    assert distance(losses(5.0, 4.0), losses(5.0, 4.0)) == 0
    assert distance(losses(5.5, 4.0), losses(5.0, 4.0)) == pytest.approx(0.1)
    assert distance(losses(5.0, 3.0), losses(5.0, 4.0)) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("ours", "serial"),
    [
        ({}, losses(5.0)),
        (losses(5.0), {}),
        (losses(5.0), losses(5.0, 4.0)),
        (losses(math.nan, 4.0), losses(5.0, 4.0)),
        (losses(5.0), losses(math.nan)),
    ],
)
def test_losses_that_cannot_be_compared_are_never_near(ours, serial):
    difference = distance(ours, serial)
    assert math.isnan(difference) and not difference <= 1e9


# The jobs


class Told:
    """Jobs that are not run: what each would find is known."""

    def __init__(self, result_of):
        self.result_of, self.ran = result_of, []
        self.console = Console(file=io.StringIO(), width=200)

    def title(self, text):
        self.console.print(text)

    def run(self, name, size, command, mpi_args, *, is_quiet):
        self.ran.append((name, size, command, tuple(mpi_args)))
        return 0, self.result_of(name)

    @property
    def said(self):
        return self.console.file.getvalue()


def compare(result_of, *words):
    """Whether it is good, and the jobs."""
    jobs = Told(result_of)
    options = parsed(["strategies", "--ranks", "1,3", *words])
    return Strategies(options, jobs).run(), jobs


ONLY = ["--only", "zero2", "--only", "ddp"]


def alike(name):
    return result() | losses(5.0, 4.0)


def test_all_runs_are_compared_with_one_rank():
    is_good, jobs = compare(alike, *ONLY)
    assert is_good
    assert [name for name, *_ in jobs.ran] == [
        "ddp float16 on 3",
        "zero2 float16 on 3",
        "serial float64 on 1",
        "ddp float64 on 1",
        "ddp float64 on 3",
        "zero2 float64 on 1",
        "zero2 float64 on 3",
        "serial float32 on 1",
        "ddp float32 on 1",
        "ddp float32 on 3",
        "zero2 float32 on 1",
        "zero2 float32 on 3",
    ]
    wanted = "| zero2    |        0.550 |          0.275 |         0.250 |   0.438 |   300.000 |"
    assert wanted in jobs.said
    assert jobs.said.count("0.0e+00") == 8


@pytest.mark.parametrize("bad", [5.0 + 1e-7, math.nan, None])
def test_one_run_that_is_too_far_or_missing_is_enough(bad):
    """The negative control; the last of all that are compared in float64."""

    def result_of(name):
        odd = {} if bad is None else result() | losses(bad, 4.0)
        return odd if name == "zero2 float64 on 3" else alike(name)

    is_good, jobs = compare(result_of, *ONLY)
    assert not is_good
    assert ("2.0e-08" if bad and bad > 0 else "nan") in jobs.said


def test_in_float32_losses_may_be_further_apart():
    def result_of(name):
        return result() | losses(5.0 + 1e-5 * ("zero2 float32" in name), 4.0)

    assert compare(result_of, *ONLY)[0]


def test_strategies_that_round_what_they_send_are_not_compared():
    _, jobs = compare(alike, "--only", "ddp, int8 hook")
    assert [name for name, *_ in jobs.ran] == [
        "ddp, int8 hook float16 on 3",
        "serial float64 on 1",
        "serial float32 on 1",
    ]


def test_options_reach_the_training_program():
    _, jobs = compare(
        alike,
        "--price-only",
        "--only",
        "zero3, kept",
        "--text",
        "a",
        "--layers",
        "7",
        "--micro-batches",
        "6",
    )
    ((name, size, command, mpi_args),) = jobs.ran
    assert (name, size) == ("zero3, kept float16 on 3", 3)
    assert command[:4] == ["-m", "parallel.train", "--strategy", "zero3"]
    for pair in (
        ["--layers", "7"],
        ["--text", "a"],
        ["--dtype", "float16"],
        ["--steps", "5"],
        ["--batch", "19"],
        ["--micro-batches", "6"],
    ):
        assert pair[1] == command[command.index(pair[0]) + 1]
    assert bool(mpi_args) == IS_OPEN_MPI


def test_a_job_without_a_result_has_no_row():
    _, jobs = compare(lambda name: {} if "ddp" in name else alike(name), "--price-only", *ONLY)
    assert "zero2" in jobs.said and "ddp" not in jobs.said


# For real


def run(*words):
    return main(["strategies", "--ranks", "2", "--price-only", "--timeout", "60", *words])


@pytest.fixture
def run_of(tmp_path):
    """What a strategy's run on so many ranks says of itself, and what it costs."""

    def run_of(name, ranks):
        file = tmp_path / "all.json"
        words = ["--ranks", str(ranks), "--text", TEXT, "--layers", "1", "--json", str(file)]
        assert run("--only", name, *words) == 0
        (result,) = json.loads(file.read_text())["jobs"].values()
        return result, costs(result)

    return run_of


@pytest.mark.ranks(n=4)
@pytest.mark.on_open_mpi
def test_a_small_run_has_the_costs_of_a_ring(run_of, capsys):
    """By ring among four ranks in pairs; 16 bytes of loss to the own pair, and to the other one."""
    result, cost = run_of("ddp", 4)
    said = capsys.readouterr().out
    assert "all 1 jobs ended well: traffic, memory and parameters compared in each" in said
    loss = 16 / (4 * result["parameters"])
    assert cost.sent == pytest.approx(3 / 4 + 2 * loss, rel=1e-12)
    assert cost.between == pytest.approx(3 / 8 + loss, rel=1e-12)
    assert cost.kept == cost.most == 1 and cost.milliseconds > 0
    assert (result["traffic"]["not_observed"] is None) == IS_OPEN_MPI
    assert f"| ddp      |        {cost.sent:.3f} |          {cost.between:.3f} |" in said


@pytest.mark.ranks(n=4)
@pytest.mark.on_open_mpi
def test_an_asynchronous_server_costs_the_same_in_any_number_of_steps(run_of):
    """A worker pulls and pushes Psi elements, and 16 bytes; the last broadcast is of no step."""
    result, cost = run_of("server-async", 2)
    assert np.sum(result["traffic"]["matrices"]["finish"]) == 2 * result["parameters"]
    assert cost.sent == pytest.approx((4 + 16 / result["parameters"]) / 8, rel=1e-12)


@pytest.mark.ranks(n=4)
@pytest.mark.on_open_mpi
def test_a_run_that_fails_is_status_1(capsys):
    assert run("--only", "ddp", "--text", "/no/such/text") == 1
    said = capsys.readouterr().out
    assert "no text in /no/such/text" in said
    assert "failed: ddp float16 on 2: traffic" in said


def test_without_mpi_it_is_said_what_to_install(monkeypatch):
    def find_none():
        raise MpiNotFound("install one of these")

    monkeypatch.setattr("bench.commands.jobs.find_mpirun", find_none)
    with pytest.raises(Refused, match="install one of these"):
        strategies.run(parsed(["strategies"]))
