"""What is said before a run is what a run sends: by kind, off each rank, and off each host."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator, Topology
from moe import GATES, RoutingLog, mixtures, moe_gpt
from moe.plan import (
    Amounts,
    HostTraffic,
    LayerAmounts,
    TrainingStep,
    compare_dispatch,
    compare_layouts,
    from_log,
    layer_amounts,
    matrices_of,
    on_text,
    predict_calls,
    uniform,
)
from moe.plan.__main__ import COMMAND
from moe.plan.across_hosts import layouts
from moe.plan.one_layer import KINDS
from moe.train import COMMAND as TRAIN
from parallel import Mesh, PredictedCall, Recipe, Sharding, Trainer, text
from parallel.accounts import between_hosts
from parallel.mesh import ROW_AXES
from parallel.predict import RunSize
from tests.moe.experts import moved

ROWS, CONTEXT, HIDDEN, EXPERTS, PARTS = 16, 8, 8, 4, 2
LAYER = "block1"
WIDTH = 8  # bytes of float64
DATA = text.load(__file__)


def model_of(gate: str = "stable", **options: Any) -> dict[str, Any]:
    return {
        "gate": gate,
        "num_experts": EXPERTS,
        "every": 1,
        "num_layers": 2,
        "hidden": HIDDEN,
        "num_heads": 2,
        "context": CONTEXT,
        **options,
    }


def step_of(log: RoutingLog, gate: str = "stable", **options: Any) -> TrainingStep:
    return TrainingStep(model_of(gate, **options), ROWS, log, num_micro_batches=PARTS)


@cache
def routed(gate: str, payload: str = "same") -> RoutingLog:
    """By a model with its initial values, on a text, on one rank.

    What the first layer rounds may change what the second one routes.
    """
    return on_text(model_of(gate, payload=payload), ROWS, DATA).log


def batch(step: int, rank: int, num_ranks: int) -> Any:
    where = {"rank": rank, "num_ranks": num_ranks}
    return text.batch(DATA, seed=0, step=step, batch_size=ROWS, context=CONTEXT, **where)


def recorded(step: TrainingStep, axes: Mapping[str, int], **changes: Any) -> dict[str, Any]:
    """The bytes from each rank to each in a real step, by phase."""

    def fn(comm: Communicator) -> dict[str, Any] | None:
        mesh = Mesh(comm, **axes)
        model = moe_gpt(**{**step.model, **changes}, mesh=mesh)
        rows = tuple(axis for axis in ROW_AXES if axis in axes)
        recipe = Recipe(num_micro_batches=PARTS)
        trainer = Trainer(mesh, model, recipe, sharding=Sharding.ddp(axes=rows))
        trainer.start()
        with comm.record() as ledger:
            trainer.train(1, batch, ROWS * CONTEXT, lambda *_: None)
        if (whole := ledger.gather()) is None:
            return None
        found: dict[str, Any] = {}
        for row in whole.rows():
            matrix = found.setdefault(row.phase, np.zeros((comm.size, comm.size), np.int64))
            matrix[row.src, row.dst] += row.bytes
        return found

    found: dict[str, Any] = collectives.run(fn, size=math.prod(axes.values()), timeout=60)[0]
    return found


def columns(sent: Amounts) -> tuple[int, ...]:
    """What can be counted: the logical bytes of a rank for itself are no message."""
    return sent.off_rank, sent.off_host, sent.busiest, sent.busiest_off_host


def counted(matrix: Any, ranks_per_host: int) -> tuple[int, ...]:
    """The same, added up one by one."""
    whole = outside = 0
    of_rank: Counter[int] = Counter()
    outside_of_rank: Counter[int] = Counter()
    for (src, dst), n in np.ndenumerate(matrix):
        whole, of_rank[src] = whole + int(n), of_rank[src] + int(n)
        if src // ranks_per_host != dst // ranks_per_host:
            outside, outside_of_rank[src] = outside + int(n), outside_of_rank[src] + int(n)
    return whole, outside, max(of_rank.values()), max(outside_of_rank.values(), default=0)


MESHES: list[tuple[dict[str, int], int]] = [
    ({"expert": 4}, 2),
    ({"data": 2, "expert": 2}, 2),
    ({"data": 2, "expert": 4}, 2),
    ({"data": 1, "expert": 3}, 1),
    ({"data": 1, "context": 2, "expert": 2}, 2),
    ({"data": 1, "expert": 2, "tensor": 2}, 2),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "capacity": {"padding": "capacity"},
    "needed": {"padding": "needed"},
    "weights": {"dispatch": "weights"},
    "cheaper": {"dispatch": "cheaper"},
    "int8": {"payload": "int8"},
    "parts": {"num_parts": 3},
}


def compare(
    step: TrainingStep,
    axes: dict[str, int],
    per_host: int,
    real: TrainingStep | None = None,
    **changes: Any,
) -> None:
    """Every kind of message, the sums of gradients apart, is what a run sends.

    Sums along tensor are in the phases of attention too.

    `real`: the step that runs, by default that which is planned.
    """
    planned = {key: value for key, value in changes.items() if key != "ranks_per_host"}
    plan = layer_amounts(step, LAYER, axes, per_host, **planned)
    found = recorded(real or step, axes, **changes)
    mine = {phase: m for phase, m in found.items() if phase.split("/")[1:2] == [LAYER]}
    named = {phase.replace(f"/{LAYER}", ""): m for phase, m in mine.items()}
    in_attention = set(named) - set(KINDS)  # of the same block
    for phase in {"forward", "backward", *in_attention}:
        named.pop(phase, None)
    kinds = [kind for kind in plan.kinds if kind.phase not in ("forward", "backward")]
    assert {kind.phase for kind in kinds} == set(named)
    for kind in kinds:
        assert columns(kind.amounts) == counted(named[kind.phase], per_host), kind.phase
    if len(kinds) == len(plan.kinds):
        assert columns(plan.total) == counted(sum(named.values()), per_host)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("axes", "per_host"), MESHES)
@pytest.mark.slow
def test_a_layer_sends_what_is_said(axes: dict[str, int], per_host: int, options: str) -> None:
    log = routed("stable", OPTIONS[options].get("payload", "same"))
    compare(step_of(log), axes, per_host, **OPTIONS[options])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.slow
def test_every_gate_sends_what_is_said(gate: str) -> None:
    compare(step_of(routed(gate), gate), {"data": 2, "expert": 4}, 2)


def test_tokens_sent_once_to_each_host_send_what_is_said() -> None:
    options = {"dispatch": "hierarchical", "ranks_per_host": 2}
    compare(step_of(routed("bias"), "bias"), {"expert": 4}, 2, **options)


def test_another_routing_is_not_what_is_sent() -> None:
    """The negative control: one token goes to another rank, and one comparison fails."""
    step = step_of(routed("bias"), "bias")
    other = replace(step, log=moved(step.log, 2))
    with pytest.raises(AssertionError, match="dispatch"):
        compare(other, {"expert": 2}, 1, step)


def test_logical_bytes_are_those_of_all_choices() -> None:
    """Also of those whose expert is on the rank of the token; padded, of the whole capacity."""
    step = step_of(routed("stable"))
    routing = step.log.whole(0, LAYER)
    plan = layer_amounts(step, LAYER, {"expert": 4}, 2)
    sent = {kind.phase: kind.amounts for kind in plan.kinds}
    wanted = int(routing.load.sum()) * HIDDEN * WIDTH
    for phase in ("dispatch", "combine"):
        for half in ("forward", "backward"):
            assert sent[f"{half}/{phase}"].logical == wanted > sent[f"{half}/{phase}"].off_rank
    assert plan.total.logical == 4 * wanted + PARTS * 4 * EXPERTS * 8  # each rank counts, twice
    capacity = math.ceil(2 * 1.25 * CONTEXT / EXPERTS)
    padded = layer_amounts(step, LAYER, {"expert": 4}, 2, padding="capacity").total
    assert padded.logical == 4 * ROWS * EXPERTS * capacity * HIDDEN * WIDTH
    assert padded.off_rank * 4 == padded.logical * 3  # (W - 1) / W of it leaves the rank


def test_the_diagonal_is_what_a_rank_has_for_itself() -> None:
    call = PredictedCall(
        "x", "all_to_all", "linear", ((1, 2), (3, 4)), 8, num_calls=3, groups=((2, 0),)
    )
    assert matrices_of([call], 3)[1].tolist() == [[96, 0, 72], [0, 0, 0], [48, 0, 24]]
    assert matrices_of([call], 3)[0].tolist() == [[0, 0, 3], [0, 0, 0], [3, 0, 0]]
    reduction = PredictedCall("x", "all_reduce", "ring", 4, 8)
    assert not np.diagonal(matrices_of([reduction], 3)[1]).any()


@pytest.mark.parametrize("axes", [{"pipe": 2, "data": 1, "expert": 2}, {"data": 2, "expert": 2}])
def test_a_trainer_without_arrays_predicts_what_one_with_arrays_does(axes: dict[str, int]) -> None:
    """All calls of a step of the whole model; another number of rows is something else."""
    step = step_of(routed("switch"), "switch")

    def fn(comm: Communicator) -> list[PredictedCall]:
        mesh = Mesh(comm, **axes)
        model = moe_gpt(**step.model, mesh=mesh)
        for layer in mixtures(model):
            layer.expected = step.log
        sharding = Sharding.ddp(axes=("data", "expert"))
        trainer = Trainer(mesh, model, Recipe(num_micro_batches=PARTS), sharding=sharding)
        return trainer.step_traffic(RunSize(1, 1, (ROWS, CONTEXT)))

    wanted = collectives.run(fn, size=4, timeout=60)[0]
    assert predict_calls(step, axes) == wanted
    assert predict_calls(replace(step, num_micro_batches=1), axes) != wanted


def test_experts_and_pipelines_across_hosts_send_what_is_computed_by_hand() -> None:
    """By hand: 2 messages of s b h for the boundary, 4 all-to-alls for each layer."""
    step = step_of(uniform(model_of("bias"), ROWS).log, "bias")
    found = compare_layouts(step, 2, 2)
    experts, pipeline, copies = (found[name] for name in ("experts", "pipeline", "copies"))
    assert isinstance(experts, HostTraffic) and isinstance(pipeline, HostTraffic)
    assert isinstance(copies, HostTraffic)
    size = ROWS * CONTEXT * HIDDEN * WIDTH
    assert pipeline.bytes["pipeline"] == 2 * size and pipeline.bytes["experts"] == 0
    assert pipeline.messages["pipeline"] == 2 * PARTS * 2  # two ranks of each stage
    rows = 0
    for layer in step.layers:
        routing = step.log.whole(0, layer.name)
        host_of_token = routing.token // (ROWS * CONTEXT // 2)
        rows += int((host_of_token != routing.expert // (EXPERTS // 2)).sum())
    counts = len(step.layers) * PARTS * 8 * 8  # 8 bytes for each of 8 pairs of ranks
    assert experts.bytes["experts"] == 4 * rows * HIDDEN * WIDTH + counts
    assert experts.bytes["pipeline"] == copies.bytes["pipeline"] == copies.bytes["experts"] == 0
    assert experts.bytes["gradients"] < copies.bytes["gradients"]  # experts have no copies


@pytest.mark.parametrize("name", ["experts", "pipeline", "copies"])
def test_all_bytes_between_hosts_are_those_of_a_run(name: str) -> None:
    step = step_of(routed("stable"))
    planned = compare_layouts(step, 2, 2)[name]
    assert isinstance(planned, HostTraffic)
    axes = layouts(2, 2)[name]
    total = sum(recorded(step, axes).values())
    assert sum(planned.bytes.values()) == between_hosts(total, Topology.consecutive(4, 2))


def test_a_dispatch_that_cannot_be_says_why() -> None:
    step = step_of(routed("bias"), "bias")
    compared = compare_dispatch(step, LAYER, {"expert": 4}, 2)
    assert compared.pop(("flat", "capacity")) == (
        "padding to the capacity needs a gate with a capacity rule"
    )
    assert len(compared) == 5
    assert all(isinstance(layer, LayerAmounts) for layer in compared.values())
    refused = compare_layouts(step, 4, 1)["pipeline"]
    assert isinstance(refused, HostTraffic)
    assert "stages" in str(compare_layouts(step, 8, 1)["pipeline"])


# Routings


@pytest.mark.parametrize("gate", GATES)
def test_a_uniform_routing_prefers_no_expert(gate: str) -> None:
    """By the gate itself: with its k and capacity; of another seed it is another one."""
    model = model_of(gate)
    found = uniform(model, 64, seed=1)
    for layer in mixtures(moe_gpt(**model)):
        routing = found.log.whole(0, layer.name)
        assert routing.num_tokens == 64 * CONTEXT
        assert routing.capacity == layer.gate.capacity(CONTEXT)
        choices = routing.choices
        assert choices.sum() == 64 * layer.gate.num_entries(CONTEXT)
        spread = 8 * math.sqrt(choices.mean()) if gate != "hash" else choices.mean()
        assert abs(choices - choices.mean()).max() < spread
    other = uniform(model, 64, seed=2).log.whole(0, LAYER)
    assert not np.array_equal(other.expert, found.log.whole(0, LAYER).expert) or (
        gate == "expert-choice"  # whose experts are the same, and not their tokens
        and not np.array_equal(other.token, found.log.whole(0, LAYER).token)
    )


def test_a_log_says_how_many_rows_it_is_of() -> None:
    whole = RoutingLog.from_bytes(routed("stable").to_bytes())
    assert from_log(whole)[1:] == (0, ROWS, CONTEXT)
    assert from_log(whole, rows_per_group=2)[2:] == (2 * ROWS, CONTEXT // 2)
    with pytest.raises(ValueError, match="the log has no step 3, only 0 to 0"):
        from_log(whole, step=3)
    with pytest.raises(ValueError, match="are not whole rows, if 3 rows were routed together"):
        from_log(whole, rows_per_group=3)
    with pytest.raises(ValueError, match="the log has no routing"):
        from_log(RoutingLog())


@pytest.mark.parametrize(
    ("gate", "options", "words"),
    [
        ("stable", {"num_layers": 3}, "the log has no routing of block2 in step 0, only of block0"),
        ("stable", {"num_experts": 8}, "block0 has 8 experts, but the routing in the log has 4"),
        ("stable", {"context": 16}, "block0 has 256 tokens, but the routing in the log has 128"),
        ("stable", {"rows_per_group": 2}, "block0 has 8 groups, but the routing in the log has 16"),
        ("switch", {}, "block0 has 128 choices, but the routing in the log has 256"),
        ("bias", {}, "block0 has None as capacity, but the routing in the log has 5"),
        ("stable", {"every": 3}, "the model has no experts"),
    ],
)
def test_a_log_of_another_model_is_refused(gate: str, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        step_of(routed("stable"), gate, **options)
    assert step_of(routed("stable"))


def test_nothing_exists_of_planned_ranks() -> None:
    """A layer of 105 G parameters on 32 ranks."""
    model = model_of(num_experts=256, hidden=7168, num_heads=8, num_layers=2)
    step = TrainingStep(model, 64, uniform(model, 64).log, dtype="bfloat16")
    axes = {"data": 2, "expert": 16}
    sent = layer_amounts(step, LAYER, axes, 8).total
    entries = int(step.log.whole(0, LAYER).load.sum())
    assert sent.logical == 4 * entries * 7168 * 2 + 32 * 256 * 8
    assert Mesh(None, **axes).size == 32


# The command


WORDS = [
    "--moe",
    "stable",
    "--experts",
    "4",
    "--hidden",
    "8",
    "--heads",
    "2",
    "--layers",
    "2",
    "--moe-every",
    "1",
]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    """The cells of each row, by the first of them."""
    assert COMMAND.main([*words, "--wide"]) == 0
    rows = [
        line.strip("|").split("|")
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|")
    ]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_the_command_predicts_a_run_of_the_training_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the log that it writes; and from the same text, of the first step.

    Deeper blocks have more experts, whose capacity is that of another rule.
    """
    log = tmp_path / "log.npz"
    model = [*WORDS, "--experts", "2,4", "--capacity-rule", "tutel"]
    common = [
        *model,
        "--context",
        "8",
        "--batch",
        "16",
        "--mesh",
        "data=2,expert=2",
        "--text",
        __file__,
    ]
    run = ["--threads", "4", "--steps", "1", "--no-monitor", "--wide", "--save-routing", str(log)]
    assert TRAIN.main([*common, *run]) == 0
    traffic = capsys.readouterr().out
    from_text = printed(capsys, *common, "--layer", "block1", "--hosts", "2")
    of_file = printed(
        capsys,
        *model,
        "--mesh",
        "data=2,expert=2",
        "--routing",
        str(log),
        "--layer",
        "block1",
        "--hosts",
        "2",
    )
    assert from_text == of_file
    for phase in ("forward/dispatch", "forward/combine", "backward/dispatch"):
        sent = of_file[phase][2]
        name = phase.replace("/", "/block1/")
        (line,) = [each for each in traffic.splitlines() if each.startswith(f"| {name} ")]
        assert [cell.strip() for cell in line.strip("|").split("|")][7:9] == [sent, sent]
    other = printed(capsys, *common, "--layer", "block1", "--hosts", "2", "--seed", "1")
    assert other["forward/dispatch"] != of_file["forward/dispatch"]  # the negative control


def test_the_command_compares_ways_and_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, *WORDS, "--mesh", "data=2,expert=4", "--hosts", "2")
    for name in ("flat", "hierarchical", "weights", "cheaper", "experts", "pipeline", "copies"):
        assert name in rows
    assert rows["all"][1:] == rows["flat"][:6]
    alone = printed(capsys, *WORDS, "--mesh", "expert=4")
    assert "pipeline" not in alone and alone["all"][3] == "0"  # one host


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mesh", "expert=4", "--moe", "some"], "invalid choice: 'some'"),
        (["--mesh", "data=4"], "--mesh needs expert=N, at least 2"),
        (["--mesh", "pipe=2,expert=2"], "--mesh takes no pipe"),
        (["--mesh", "expert=2,some=2"], "there is no axis 'some'"),
        (["--mesh", "expert=3", "--hosts", "2"], "2 hosts do not have equally many of 3 ranks"),
        (["--mesh", "expert=4", "--routing", __file__], "it is no log of routings"),
        (["--mesh", "expert=4", "--routing", "/no/such/file"], "No such file"),
        (["--mesh", "expert=4", "--layer", "block0"], "no experts are in 'block0': choose from"),
        (["--mesh", "expert=32"], "a batch of 16 rows cannot be divided among 32 ranks"),
        (["--mesh", "expert=4", "--moe", "bias", "--top-k", "9"], "k is 9: it must be from 1 to 8"),
        (["--mesh", "expert=4", "--moe", "hash", "--padding", "capacity"], "a capacity rule"),
        (["--mesh", "expert=4", "--step", "1"], "--step needs --routing"),
        (["--mesh", "expert=4", "--text", "/no/text"], "there is no text in /no/text"),
        (["--mesh", "expert=4", "--rows-per-group", "3"], "are not whole groups of 3"),
        (
            ["--mesh", "expert=2", "--rows-per-group", "2", "--batch", "6"],
            "3 rows of a rank are not whole groups of 2",
        ),
        (["--mesh", "expert=4,expert=2"], "is not AXIS=N"),
        (["--mesh", "expert=4", "--experts", "4,0"], "0 is less than 1"),
        (["--mesh", "expert=4", "--capacity-rule", "some"], "invalid choice: 'some'"),
        (["--mesh", "expert=4", "--capacity-factor", "0"], "capacity_factor is 0.0"),
        (["--mesh", "expert=4", "--moe", "hash", "--capacity-rule", "none"], "no option rule"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        COMMAND.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_log_of_another_shape_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.npz"
    path.write_bytes(routed("stable").to_bytes())
    words = [*WORDS, "--mesh", "expert=4", "--routing", str(path)]
    assert COMMAND.main(words) == 0
    for more, said in (
        (["--batch", "8"], "--batch is 8, but the log is of 16"),
        (["--context", "4"], "--context is 4, but the log is of 8"),
        (["--step", "2"], "the log has no step 2"),
        (["--experts", "8"], "has 8 experts, but the routing in the log has 4"),
        (["--experts", "4,8"], "block1 has 8 experts, but the routing in the log has 4"),
        (["--capacity-rule", "tutel"], "has 4 as capacity, but the routing in the log has 5"),
    ):
        with pytest.raises(SystemExit):
            COMMAND.main([*words, *more])
        assert said in capsys.readouterr().err
