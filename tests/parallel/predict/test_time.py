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
from moe.plan import TrainingStep, layout_of, uniform
from parallel import Layout, Mesh, RankView, Recipe, Sharding, gpt
from parallel.layout import BatchSize, views_of_parts
from parallel.pipeline import Times, make, simulate
from parallel.predict import Prices, StepTime, simulate_step
from parallel.simulate import COMMAND
from parallel.step import Action, LayerAction, Reduce, led_by, lower

FREE = Machine({"same_host": (Link(),), "other_host": (Link(),)})
SLOW = Machine({"same_host": (Link(seconds_per_byte=1e-6),), "other_host": (Link(1e-3),)})
LATE = Machine({"same_host": (Link(latency_seconds=0.5),), "other_host": (Link(),)})
LAYERS, ROWS, CONTEXT = 6, 8, 8


def one_host(num_ranks: int, machine: Machine) -> Network:
    return Tree(machine, num_ranks, (Level("NIC", num_ranks, 1, 1e12),))


def layout_on(
    micro_batches: int = 4, sharding: Sharding | None = None, schedule: str = "1f1b", **axes: int
) -> Layout:
    mesh = Mesh(None, **axes)
    is_parallel = "tensor" in axes
    model = gpt(
        num_layers=LAYERS,
        hidden=16,
        num_heads=2,
        context=CONTEXT,
        mesh=mesh,
        sequence_parallel="gather" if is_parallel else None,
    )
    recipe = Recipe("float32", num_micro_batches=micro_batches)
    sharding = sharding or Sharding.ddp()
    return Layout(mesh, model, recipe, sharding=sharding, schedule=schedule)


def actions_of(layout: Layout) -> list[Action]:
    """What the first rank does."""
    return lower(RankView(layout, 0))


def step_of(
    layout: Layout, machine: Machine, forward: Callable[[str], float]
) -> tuple[StepTime, Prices]:
    prices = Prices(machine, one_host(layout.mesh.size, machine))
    return simulate_step(layout, (ROWS, CONTEXT), forward, prices), prices


def equal_stages(layout: Layout) -> Callable[[str], float]:
    """Every stage takes a second forward."""
    sizes = {name: len(layers) for layers in layout.stages.layers for name in layers}
    return lambda name: 1 / sizes[name]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved"])
def test_without_costs_of_messages_a_step_is_its_pipeline(schedule: str) -> None:
    layout = layout_on(8, schedule=schedule, pipe=4, data=1)
    step, _ = step_of(layout, FREE, equal_stages(layout))
    pipeline = simulate(make(schedule, 4, 8), Times(1, 1, 1))
    assert step.seconds == pytest.approx(float(pipeline.makespan))
    for place in range(4):
        assert step.computing(place) == pytest.approx(float(pipeline.busy(place)))


def test_messages_between_stages_take_their_time() -> None:
    layout = layout_on(8, pipe=4, data=1)
    step, _ = step_of(layout, LATE, equal_stages(layout))
    pipeline = simulate(make("1f1b", 4, 8), Times(1, 1, 1, message=0.5))
    # The loss is summed at the end, in log2(4) rounds.
    assert step.seconds == pytest.approx(float(pipeline.makespan) + 2 * 0.5, rel=0.02)


def test_sums_are_exposed_only_where_nothing_is_left_to_compute() -> None:
    layout = layout_on(1, Sharding.ddp(bucket_bytes=1), data=4)
    alone, prices = step_of(layout, SLOW, lambda _: 0.0)
    reduce = [a for a in actions_of(layout) if isinstance(a, Reduce)]
    total = sum(prices.of(call) for a in reduce for call in a.sends(RankView(layout, 0)))
    assert total > 0
    assert alone.exposed(0)["data"] == pytest.approx(total, rel=0.01)
    hidden, _ = step_of(layout, SLOW, lambda _: total)
    assert hidden.exposed(0)["data"] < 0.5 * total


def test_what_layers_send_is_exposed() -> None:
    layout = layout_on(tensor=2, data=1)
    step, prices = step_of(layout, SLOW, lambda _: 1.0)
    batch = BatchSize(ROWS, CONTEXT)
    calls = [c for a in actions_of(layout) for c in a.sends(RankView(layout, 0), batch)]
    expected = sum(prices.of(call) for call in calls if call.axis == "tensor")
    assert step.exposed(0)["tensor"] == pytest.approx(expected)
    assert step.computing(0) == pytest.approx(4 * 3 * (LAYERS + 3))


@pytest.mark.parametrize(("attention", "at_once"), [("ring", 2), ("ulysses", 1)])
def test_what_ranks_that_divide_rows_send_is_exposed(attention: str, at_once: int) -> None:
    """Both ranks of a ring send at the same time."""
    mesh = Mesh(None, data=1, context=2)
    model = gpt(
        num_layers=LAYERS, hidden=16, num_heads=2, context=CONTEXT, mesh=mesh, attention=attention
    )
    sharding = Sharding.ddp(axes=("data", "context"))
    layout = Layout(mesh, model, Recipe("float32"), sharding=sharding)
    step, prices = step_of(layout, SLOW, lambda _: 1.0)
    batch = BatchSize(ROWS, CONTEXT)
    calls = [c for a in actions_of(layout) for c in a.sends(RankView(layout, 0), batch)]
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
    plain = layout_on(data=1)
    model = gpt(num_layers=LAYERS, hidden=16, num_heads=2, context=CONTEXT, recompute=("block*",))
    again = Layout(plain.mesh, model, plain.recipe, sharding=plain.sharding)
    (first, _), (second, _) = (step_of(each, FREE, lambda _: 1.0) for each in (plain, again))
    assert second.seconds - first.seconds == pytest.approx(4 * LAYERS)


def test_a_model_with_experts_waits_for_what_these_send() -> None:
    model = {
        "gate": "stable",
        "num_experts": 4,
        "every": 1,
        "num_layers": 2,
        "hidden": 8,
        "num_heads": 2,
        "context": CONTEXT,
    }
    log = uniform(model, ROWS).log
    layout = layout_of(TrainingStep(model, ROWS, log), {"data": 2, "expert": 4})
    step, _ = step_of(layout, SLOW, lambda _: 1.0)
    free, _ = step_of(layout, FREE, lambda _: 1.0)
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
    assert COMMAND.main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 ranks, pipe 2 x data 2 x tensor 2, hosts:2x4:")
    for axis in ("pipe", "data", "tensor"):
        assert re.search(rf"\b{axis} (ns|us|ms)\b", out)
    assert len(re.findall(r"^\| [01] .*% \|$", out, re.MULTILINE)) == 2
    labels = [each.text for each in ElementTree.fromstring(path.read_text()).findall(".//{*}text")]
    assert {"forward", "backward", "tensor", "pipe 0", "pipe 1"} <= set(labels)


SMALL = "--layers 2 --hidden 32 --heads 4 --context 16 --vocab-size 64 --micro-batches 2"


def seconds_of(capsys: pytest.CaptureFixture[str], arguments: str) -> tuple[str, float]:
    """What the command prints, and the seconds in it."""
    assert COMMAND.main(f"{SMALL} {arguments}".split()) == 0
    out = capsys.readouterr().out
    return out, float(out.split("hosts:2x4: ")[1].split(" s a step")[0])


def test_the_command_divides_rows_and_counts_their_computation_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = "--topology hosts:2x4 --flops 1M"  # so that nothing else takes time
    out, divided = seconds_of(capsys, f"--mesh data=4,context=2 {slow} --zero 0")
    assert "context " in out and "data,context " in out
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
        COMMAND.main(f"{SMALL} {arguments}".split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("axes", [{"tensor": 3}, {"pipe": 2, "data": 2, "tensor": 2}])
def test_a_part_of_the_model_leads_the_groups_whose_first_rank_has_it(axes: dict[str, int]) -> None:
    """A layer asks the ranks of the part alone, and finds what a look at all ranks finds."""
    layout, batch = layout_on(**{"data": 1, **axes}), BatchSize(ROWS, CONTEXT)
    num_led = num_left = 0
    for view in views_of_parts(layout):
        for action in lower(view):
            if isinstance(action, LayerAction):
                sent, led = list(action.sends(view, batch)), list(action.led(view, batch))
                assert led == list(led_by(view, sent))
                num_led, num_left = num_led + len(led), num_left + len(sent) - len(led)
    assert num_led and num_left, "some groups are of another part of the model"
