"""Training steps in simulated time, against pipelines, closed forms and prices of single calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from collectives import choose
from collectives.selection.decisions import Decisions
from collectives.selection.machine_file import Fitted
from collectives.simulation import Level, Link, Machine, Network, Tree, network_of, simulate_call
from moe.plan import uniform
from moe.plan.job import Job, trainer_of
from parallel import Recipe, Sharding, gpt
from parallel.pipeline import Times, make, simulate
from parallel.plan.ranks import PlannedMesh, PlannedTrainer
from parallel.plan.step import Prices, Step, simulate_step
from parallel.runtime.state import BatchSize
from parallel.simulate import main

FREE = Machine({"same_host": (Link(),), "other_host": (Link(),)})
SLOW = Machine({"same_host": (Link(seconds_per_byte=1e-6),), "other_host": (Link(1e-3),)})
LATE = Machine({"same_host": (Link(latency_seconds=0.5),), "other_host": (Link(),)})
LAYERS, ROWS, CONTEXT = 6, 8, 8


def one_host(num_ranks: int, machine: Machine) -> Network:
    return Tree(machine, num_ranks, (Level("NIC", num_ranks, 1, 1e12),))


def trainer_on(
    micro_batches: int = 4, sharding: Sharding | None = None, schedule: str = "1f1b", **axes: int
) -> PlannedTrainer:
    mesh = PlannedMesh(**axes)
    is_parallel = "tensor" in axes
    model = gpt(
        num_layers=LAYERS, hidden=16, num_heads=2, context=CONTEXT, mesh=mesh,
        sequence_parallel="gather" if is_parallel else None,
    )  # fmt: skip
    recipe = Recipe("float32", num_micro_batches=micro_batches)
    sharding = sharding or Sharding.ddp()
    return PlannedTrainer(mesh, model, recipe, sharding=sharding, schedule=schedule)


def step_of(
    trainer: PlannedTrainer, machine: Machine, forward: Callable[[str], float]
) -> tuple[Step, Prices]:
    prices = Prices(machine, one_host(trainer.mesh.size, machine))
    return simulate_step(trainer, (ROWS, CONTEXT), forward, prices), prices


def equal_stages(trainer: PlannedTrainer) -> Callable[[str], float]:
    """Every stage takes a second forward."""
    sizes = {name: len(layers) for layers in trainer.stages.layers for name in layers}
    return lambda name: 1 / sizes[name]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved"])
def test_without_costs_of_messages_a_step_is_its_pipeline(schedule: str) -> None:
    trainer = trainer_on(8, schedule=schedule, pipe=4, data=1)
    step, _ = step_of(trainer, FREE, equal_stages(trainer))
    pipeline = simulate(make(schedule, 4, 8), Times(1, 1, 1))
    assert step.seconds == pytest.approx(float(pipeline.makespan))
    for place in range(4):
        assert step.computing(place) == pytest.approx(float(pipeline.busy(place)))


def test_messages_between_stages_take_their_time() -> None:
    trainer = trainer_on(8, pipe=4, data=1)
    step, _ = step_of(trainer, LATE, equal_stages(trainer))
    pipeline = simulate(make("1f1b", 4, 8), Times(1, 1, 1, message=0.5))
    # The loss is summed at the end, in log2(4) rounds.
    assert step.seconds == pytest.approx(float(pipeline.makespan) + 2 * 0.5, rel=0.02)


def test_sums_are_exposed_only_where_nothing_is_left_to_compute() -> None:
    trainer = trainer_on(1, Sharding.ddp(bucket_bytes=1), data=4)
    alone, prices = step_of(trainer, SLOW, lambda _: 0.0)
    reduce = [a for a in trainer.actions if a.kind == "REDUCE"]
    total = sum(prices.of(call) for a in reduce for call in trainer.calls_of(a))
    assert total > 0
    assert alone.exposed(0)["data"] == pytest.approx(total, rel=0.01)
    hidden, _ = step_of(trainer, SLOW, lambda _: total)
    assert hidden.exposed(0)["data"] < 0.5 * total


def test_what_layers_send_is_exposed() -> None:
    trainer = trainer_on(tensor=2, data=1)
    step, prices = step_of(trainer, SLOW, lambda _: 1.0)
    batch = BatchSize(ROWS, CONTEXT)
    calls = [c for a in trainer.actions for c in trainer.calls_of(a, batch)]
    expected = sum(prices.of(call) for call in calls if call.axis == "tensor")
    assert step.exposed(0)["tensor"] == pytest.approx(expected)
    assert step.computing(0) == pytest.approx(4 * 3 * (LAYERS + 3))


@pytest.mark.parametrize(("attention", "at_once"), [("ring", 2), ("ulysses", 1)])
def test_what_ranks_that_divide_rows_send_is_exposed(attention: str, at_once: int) -> None:
    """Both ranks of a ring send at the same time."""
    mesh = PlannedMesh(data=1, context=2)
    model = gpt(
        num_layers=LAYERS, hidden=16, num_heads=2, context=CONTEXT, mesh=mesh, attention=attention
    )
    sharding = Sharding.ddp(axes=("data", "context"))
    trainer = PlannedTrainer(mesh, model, Recipe("float32"), sharding=sharding)
    step, prices = step_of(trainer, SLOW, lambda _: 1.0)
    calls = [c for a in trainer.actions for c in trainer.calls_of(a, BatchSize(ROWS, CONTEXT))]
    expected = sum(prices.of(call) for call in calls if call.axis == "context")
    assert expected > 0
    assert step.exposed(0)["context"] == pytest.approx(expected / at_once)


def test_groups_that_share_a_nic_are_priced_together() -> None:
    machine = Machine({"same_host": (Link(),), "other_host": (Link(seconds_per_byte=1e-6),)})
    network = network_of("hosts:2x2", machine)
    spec = choose("all_reduce", "ring", 2, 4096).spec(4096)
    one = simulate_call(spec, machine, network, groups=[(0, 2)]).seconds
    both = simulate_call(spec, machine, network, groups=[(0, 2), (1, 3)]).seconds
    assert both == pytest.approx(2 * one, rel=0.01)


def test_recomputation_adds_a_forward() -> None:
    plain = trainer_on(data=1)
    model = gpt(num_layers=LAYERS, hidden=16, num_heads=2, context=CONTEXT, recompute=("block*",))
    again = PlannedTrainer(plain.mesh, model, plain.recipe, sharding=plain.sharding)
    (first, _), (second, _) = (step_of(each, FREE, lambda _: 1.0) for each in (plain, again))
    assert second.seconds - first.seconds == pytest.approx(4 * LAYERS)


def test_a_model_with_experts_waits_for_what_these_send() -> None:
    model = {"gate": "stable", "num_experts": 4, "every": 1, "num_layers": 2, "hidden": 8,
             "num_heads": 2, "context": CONTEXT}  # fmt: skip
    log = uniform(model, ROWS).log
    trainer = trainer_of(Job(model, ROWS, log), {"data": 2, "expert": 4})
    step, _ = step_of(trainer, SLOW, lambda _: 1.0)
    free, _ = step_of(trainer, FREE, lambda _: 1.0)
    assert step.exposed(0)["expert"] > 0
    assert step.seconds > free.seconds


def test_the_command_prints_and_draws_a_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "step.svg"
    arguments = (
        "--mesh pipe=2,data=2,tensor=2 --layers 4 --hidden 32 --heads 4 --context 16"
        f" --vocab-size 64 --micro-batches 4 --topology hosts:2x4 --picture {path}"
    )
    assert main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 ranks, pipe 2 x data 2 x tensor 2, hosts:2x4:")
    for axis in ("pipe", "data", "tensor"):
        assert f"{axis} s" in out
    assert len(re.findall(r"^\S*\s*[01] .*%", out, re.MULTILINE)) == 2
    labels = [each.text for each in ElementTree.fromstring(path.read_text()).findall(".//{*}text")]
    assert {"forward", "backward", "tensor", "place 0", "place 1"} <= set(labels)


SMALL = "--layers 2 --hidden 32 --heads 4 --context 16 --vocab-size 64 --micro-batches 2"


def seconds_of(capsys: pytest.CaptureFixture[str], arguments: str) -> tuple[str, float]:
    """What the command prints, and the seconds in it."""
    assert main(f"{SMALL} {arguments}".split()) == 0
    out = capsys.readouterr().out
    return out, float(out.split("hosts:2x4: ")[1].split(" s a step")[0])


def test_the_command_divides_rows_and_counts_their_computation_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = "--topology hosts:2x4 --flops 1M"  # so that nothing else takes time
    out, divided = seconds_of(capsys, f"--mesh data=4,context=2 {slow} --zero 0")
    assert "context s" in out and "data,context s" in out
    _, whole = seconds_of(capsys, f"--mesh data=4 {slow} --zero 0")
    assert whole == pytest.approx(2 * divided, rel=1e-3)


def test_the_command_reads_a_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    slow = Machine({"same_host": (Link(latency_seconds=1.0),), "other_host": (Link(),)})
    path.write_text(Decisions({}, Fitted({}, slow)).to_json())
    arguments = "--mesh data=2,tensor=4 --topology hosts:2x4"
    (_, plain), (_, late) = (
        seconds_of(capsys, f"{arguments}{each}") for each in ("", f" --machine {path}")
    )
    assert plain < 1 < late


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mesh data=8 --topology hosts:1x4", "has room for 4 ranks, not for 8"),
        ("--mesh expert=2 --topology hosts:1x4", "pipe, data, context, tensor, not expert"),
        ("--mesh context=20 --topology hosts:5x4", "20 ranks cannot divide 16 positions"),
        ("--mesh data=2 --topology hosts:1x2 --machine none.json", "none.json"),
    ],
)
def test_the_command_refuses_what_it_cannot_simulate(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(f"{SMALL} {arguments}".split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err
