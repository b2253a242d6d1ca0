"""Plans of large runs: published configurations fit, and formulas are those of small runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import Mesh, PredictedCall, Recipe, Sharding, Trainer, gpt
from parallel.pipeline import make, simulate
from parallel.pipeline.actions import Action
from parallel.pipeline.schedule import computations
from parallel.plan import Candidate, Job, Machine, candidates_for, cost_of
from parallel.plan.__main__ import COMMAND
from parallel.plan.candidates import RECOMPUTE, SCHEDULES_TRIED
from parallel.plan.cost import divided, forward_flops, lists
from parallel.run.memory import peak_memory

GPT3 = Job(96, 12288, 96)
PETAFLOPS_DAY = 1e15 * 24 * 3600


class Published(NamedTuple):
    """A row of table 1 of Narayanan et al. 2021; on GPUs of 80 GB, eight in a host."""

    billions: float
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipe: int
    gpus: int
    batch: int


PUBLISHED = [
    Published(1.7, 24, 2304, 24, 1, 1, 32, 512),
    Published(3.6, 32, 3072, 30, 2, 1, 64, 512),
    Published(7.5, 32, 4096, 36, 4, 1, 128, 512),
    Published(18.4, 48, 6144, 40, 8, 1, 256, 1024),
    Published(39.1, 64, 8192, 48, 8, 2, 512, 1536),
    Published(76.1, 80, 10240, 60, 8, 4, 1024, 1792),
    Published(145.6, 96, 12288, 80, 8, 8, 1536, 2304),
    Published(310.1, 128, 16384, 96, 8, 16, 1920, 2160),
    Published(529.6, 128, 20480, 105, 8, 35, 2520, 2520),
    Published(1008.0, 160, 25600, 128, 8, 64, 3072, 3072),
]


@pytest.mark.parametrize("row", PUBLISHED, ids=str)
def test_published_configurations_fit(row: Published) -> None:
    """With full recomputation, as in the paper; its table counts one table of tokens."""
    job = Job(row.layers, row.hidden, row.heads, batch=row.batch)
    of_paper = job.num_parameters - job.vocab_size * job.hidden
    assert of_paper / 1e9 == pytest.approx(row.billions, rel=0.002, abs=0.05)
    machine, data = Machine(row.gpus // 8, 8), row.gpus // (row.tensor * row.pipe)
    candidate = Candidate(row.pipe, data, row.tensor, 1, 1, "all")
    assert cost_of(job, candidate, machine).memory < 80e9


def test_gpt3_fits_on_no_gpu_alone_and_not_with_tensor_ranks_only() -> None:
    """The negative control: 2.8 TB of states."""
    alone = cost_of(replace(GPT3, batch=1), Candidate(1, 1, 1, 1, 1), Machine(1, 1))
    assert alone.states == pytest.approx(16 * GPT3.num_parameters)
    assert cost_of(GPT3, Candidate(1, 128, 8, 1, 1, "all"), Machine(128, 8)).memory > 80e9


def test_operations_are_those_of_the_layers() -> None:
    """The formula of the paper, and two for each element of a matrix, three times."""
    job = Job(4, 512, 8, context=256, vocab_size=1000, batch=8)
    candidate = Candidate(1, 1, 1, 1, micro_batch=8)
    model = divided(job, 1, 8, "none").model
    forward = sum(sum(forward_flops(job, candidate, model, name)) for name in model.layers)
    assert 3 * forward == pytest.approx(job.flops, rel=1e-3)


def test_gpt3_takes_288_years_of_a_v100() -> None:
    """8 T P operations for 300 G tokens: the paper's estimate implies 46 of 125 TFLOP/s."""
    seconds = 288 * 365.25 * 24 * 3600
    speed = 8 * 300e9 * 175e9 / seconds
    assert 0.36 < speed / 125e12 < 0.38
    training = 300e9 / (GPT3.batch * GPT3.context) * GPT3.flops * 4 / 3  # recomputed once
    assert training / speed / seconds == pytest.approx(1, rel=0.03)
    assert training * 3 / 4 / PETAFLOPS_DAY == pytest.approx(3640, rel=0.03)  # Brown et al. 2020


def test_the_bubble_is_that_of_the_schedule() -> None:
    for schedule in ("1f1b", "interleaved", "zb-h1"):
        job = replace(GPT3, batch=8 * 16)
        cost = cost_of(job, Candidate(8, 8, 8, 1, 1, "none", schedule), Machine(64, 8))
        found = simulate(make(schedule, 8, 16)).fractions[1]
        assert cost.bubble == pytest.approx(found)


SMALL = Job(8, 16, 4, context=8, vocab_size=256, batch=16)
RUNS = [
    Candidate(2, 2, 2, 1, 1),
    Candidate(4, 2, 1, 1, 2),
    Candidate(4, 2, 1, 1, 2, "none", "interleaved"),
    Candidate(8, 1, 1, 1, 1, "all"),
    Candidate(1, 4, 2, 2, 1),
    Candidate(1, 8, 1, 3, 1),
    Candidate(1, 2, 4, 3, 2, "all"),
    Candidate(2, 2, 2, 1, 1, "attention", "zb-h1"),
    Candidate(4, 1, 2, 1, 1, "none", "zb-h1"),
]


def predicted(candidate: Candidate) -> tuple[float, float, dict[str, int]]:
    """What a trainer predicts: the most states, activations and bytes sent of a rank."""

    def on_rank(comm: Communicator) -> tuple[dict[str, int], list[PredictedCall]]:
        mesh = Mesh(comm, pipe=candidate.pipe, data=candidate.data, tensor=candidate.tensor)
        model = gpt(
            num_layers=SMALL.num_layers,
            hidden=SMALL.hidden,
            num_heads=SMALL.num_heads,
            context=SMALL.context,
            mesh=mesh,
            recompute=RECOMPUTE[candidate.recompute],
            sequence_parallel="gather" if candidate.tensor > 1 else None,
        )
        recipe = Recipe(dtype="float16", num_micro_batches=candidate.num_micro_batches(SMALL))
        trainer = Trainer(
            mesh, model, recipe, sharding=Sharding.zero(candidate.zero), schedule=candidate.schedule
        )
        calls = trainer.traffic(1, batch=(SMALL.batch, SMALL.context))
        return peak_memory(trainer, SMALL.batch // candidate.data, SMALL.context), calls

    size = candidate.pipe * candidate.data * candidate.tensor
    kept, calls = zip(*collectives.run(on_rank, size=size), strict=True)
    sent = dict.fromkeys(("pipe", "data", "tensor"), np.zeros(size, np.int64))
    for call in calls[0]:
        if not call.phase.startswith(("start", "loss", "norm")):
            sent[call.axis] = sent[call.axis] + call.matrices(size)[1].sum(axis=1)
    states = ("parameters", "gradients", "master", "optimizer")
    return (
        max(sum(each[name] for name in states) for each in kept),
        max(each["activations"] for each in kept),
        {axis: int(x.max()) for axis, x in sent.items()},
    )


@pytest.mark.parametrize("candidate", RUNS, ids=str)
@pytest.mark.slow
def test_a_plan_is_to_the_byte_what_a_trainer_predicts(candidate: Candidate) -> None:
    """Of small runs, whose predictions other tests compare with what ranks do."""
    cost = cost_of(SMALL, candidate, Machine(1, 8))
    assert (cost.states, cost.activations, cost.sent) == predicted(candidate)


def test_another_schedule_keeps_other_activations() -> None:
    """The negative control: ZB-H1 keeps more than 1F1B on the last rank."""
    candidate = Candidate(4, 1, 2, 1, 1, "none", "1f1b")
    assert cost_of(SMALL, candidate, Machine(1, 8)).activations < predicted(RUNS[-1])[1]


@pytest.mark.parametrize("schedule", SCHEDULES_TRIED)
@pytest.mark.parametrize(("num_ranks", "m"), [(2, 8), (3, 21), (4, 20), (4, 32), (6, 36)])
def test_the_first_rounds_keep_as_much_as_all(schedule: str, num_ranks: int, m: int) -> None:
    short, whole = lists(schedule, num_ranks, m), make(schedule, num_ranks, m).actions
    assert len(short[0]) < len(whole[0])
    for some, every in zip(short, whole, strict=True):
        assert most_kept(some) == most_kept(every)


def most_kept(actions: tuple[Action, ...]) -> int:
    """With a rest, from I to W, that is two thirds of what forward saves."""
    change = {"F": 3, "B": -3, "I": -1, "W": -2}
    return max(accumulate(change[action.letter] for action in computations(actions)))


def test_zero_two_sends_for_every_micro_batch() -> None:
    cost = {
        zero: cost_of(replace(GPT3, batch=64), Candidate(8, 8, 1, zero, 1), Machine(8, 8))
        for zero in (1, 2)
    }
    assert cost[2].sent["data"] / cost[1].sent["data"] == (8 + 1) / 2
    saved = 1 - cost[2].states / cost[1].states
    assert saved == pytest.approx((2 - 2 / 8) / (4 + 12 / 8), rel=0.01)


def test_layouts_use_all_ranks_and_divide_the_batch() -> None:
    machine = Machine(4, 8)
    found = list(candidates_for(Job(8, 64, 4, batch=64), machine))
    assert len(set(found)) == len(found) > 50
    for candidate in found:
        assert candidate.pipe * candidate.data * candidate.tensor == machine.num_ranks
        assert candidate.tensor <= 4 and 64 % (candidate.data * candidate.micro_batch) == 0


def test_the_command_lists_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--layers", "4", "--hidden", "64", "--heads", "4", "--context", "64"]
    assert COMMAND.main([*small, "--hosts", "2x4", "--batch", "16", "--ranks", "8"]) == 0
    said = capsys.readouterr().out
    assert "ZeRO-3 alone" in said and "What each axis divides" in said
    assert COMMAND.main([*small, "--hosts", "1x2", "--gpu-memory", "1K", "--batch", "2"]) == 0
    assert "no layout fits" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_alone_plans_gpt_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMAND.main([]) == 0
    assert capsys.readouterr().out.startswith("175.2 G parameters")


@pytest.mark.parametrize("ranks", [3, 8, 24])
def test_ranks_without_hosts_are_on_as_many_hosts_as_they_fill(
    ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--layers", "4", "--hidden", "64", "--heads", "4", "--context", "64"]
    hosts = {3: "1x3", 8: "1x8", 24: "3x8"}[ranks]
    said = []
    for words in (["--ranks", str(ranks)], ["--hosts", hosts]):
        assert COMMAND.main([*small, *words]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--heads", "3"], "3 heads do not divide"),
        (["--ranks", "5", "--hosts", "1x4"], "4 ranks are on the hosts, not 5"),
        (["--ranks", "12"], "12 ranks do not fill hosts of 8: name them by --hosts"),
        (
            ["--ranks", "4", "--hosts", "1x4", "--layers", "2", "--heads", "2", "--batch", "1"],
            "4 ranks cannot divide a batch of 1, 2 layers and 2 heads",
        ),
        (["--ranks", "7"], "7 ranks cannot divide a batch of 1536, 4 layers and 4 heads"),
        (["--hosts", "8"], "two numbers"),
        (["--gpu-memory", "x"], "not a number"),
    ],
)
def test_the_command_refuses_in_a_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        COMMAND.main(["--layers", "4", "--hidden", "64", "--heads", "4", *words])
    assert stop.value.code == 2 and said in capsys.readouterr().err
