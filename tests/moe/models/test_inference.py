"""Text does not depend on the mesh; what tokens read and send follows from their routing."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator
from moe import GATES, RoutingLog, mixtures, moe_gpt
from moe.models.gpt import gate_by_name
from moe.models.inference import bytes_read, count_reads, without_capacity
from parallel import Mesh, Sharding, TrafficMismatch, TrafficTable, Trainer, checkpoint, gpt
from parallel.inference import Inference, generate
from parallel.nn import Linear, Model

PROMPTS = [b"The ranks", b"of a mesh", b"divide", b"the experts", b"!"]
CONTEXT, EXPERTS, TOKENS, SEED = 32, 4, 6, 5
SAMPLED = [name for name in GATES if name != "expert-choice"]
ORDINARY: dict[str, Any] = {"num_layers": 2, "hidden": 12, "num_heads": 2, "context": CONTEXT}


class Found(NamedTuple):
    """Of one rank; `table` on rank 0 only."""

    texts: list[bytes]
    counted: list[int]  # the bytes of weights read, by pass
    predicted: list[int]
    table: TrafficTable | None
    inference: Inference
    ledger: collectives.Ledger | None


def make(
    mesh: Mesh | None, gate: str | None, log: RoutingLog | None = None, **options: Any
) -> Model:
    if gate is None:
        return gpt(mesh=mesh, **ORDINARY)
    gates = without_capacity(gate_by_name(gate, {}))
    return moe_gpt(
        gate=gates,
        num_experts=EXPERTS,
        every=1,
        num_shared=1,
        mesh=mesh,
        log=log,
        **options,
        **ORDINARY,
    )


def run(
    gate: str | None,
    prompts: list[bytes] = PROMPTS,
    temperature: float = 0.0,
    options: dict[str, Any] | None = None,
    **axes: int,
) -> list[Found]:
    def on_rank(comm: Communicator) -> Found:
        mesh, log = Mesh(comm, **axes or {"data": 1}), RoutingLog()
        model = make(mesh, gate, log, **options or {})
        parameters = {unit: 3 * model.draw(unit, SEED) for unit in model.units}
        inference = Inference(mesh, model, parameters, len(prompts))
        count_reads(inference)
        with comm.record() as ledger:
            texts = generate(inference, prompts, TOKENS, temperature=temperature, seed=SEED)
        whole, found = ledger.gather(), log.gathered(comm)
        for layer in mixtures(model):
            layer.expected = found
        counted = [each.bytes_read for each in inference.passes]
        predicted = bytes_read(inference, found, comm.rank)
        table = None
        if whole is not None:
            table = TrafficTable(inference.traffic(), whole, None, size=comm.size)
        return Found(texts, counted, predicted, table, inference, whole)

    return collectives.run(on_rank, size=math.prod(axes.values()))


@cache
def alone(gate: str | None, temperature: float = 0.0) -> Found:
    (found,) = run(gate, temperature=temperature)
    return found


def check(found: list[Found], wanted: list[bytes]) -> None:
    texts = {
        row: text
        for each in found
        for row, text in zip(each.inference.rows, each.texts, strict=True)
    }
    assert [texts[row] for row in range(len(wanted))] == wanted
    assert all(each.counted == each.predicted for each in found)
    assert found[0].table is not None and found[0].table.check()


LAYOUTS: list[dict[str, int]] = [
    {"expert": 2},
    {"expert": 4},
    {"tensor": 2},
    {"expert": 2, "tensor": 2},
    {"data": 2},
    {"data": 2, "expert": 2},
    {"expert": 8},
    {"expert": 3, "tensor": 2},
]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("axes", LAYOUTS)
@pytest.mark.slow
def test_text_does_not_depend_on_the_mesh(axes: dict[str, int], temperature: float) -> None:
    """Of 5 texts, also on 8 ranks, of which some have none; weights and traffic as predicted."""
    check(run("switch", temperature=temperature, **axes), alone("switch", temperature).texts)


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.slow
def test_every_gate_gives_the_text_of_one_rank(name: str) -> None:
    check(run(name, expert=2, tensor=2), alone(name).texts)


def test_tokens_that_are_sent_once_to_each_host_give_the_text_of_one_rank() -> None:
    check(
        run("stable", options={"dispatch": "hierarchical", "ranks_per_host": 2}, expert=4),
        alone("stable").texts,
    )


@pytest.mark.parametrize("axes", [{"tensor": 3}, {"data": 3}, {"data": 2, "tensor": 2}])
def test_a_model_without_experts_gives_the_text_of_one_rank(axes: dict[str, int]) -> None:
    check(run(None, **axes), alone(None).texts)


def test_drawn_texts_differ_from_the_most_likely() -> None:
    assert alone("switch").texts != alone("switch", 1.5).texts
    first, *_ = alone("switch", 1.5).texts
    assert first.startswith(PROMPTS[0]) and len(first) == len(PROMPTS[3]) + TOKENS


def differs(model: Model) -> bool:
    """Whether the logits behind a text depend on how many tokens were read at a time."""
    parameters = {unit: 3 * model.draw(unit, SEED) for unit in model.units}
    tokens = np.frombuffer(PROMPTS[3], np.uint8).astype(np.int64)[None]
    at_once, one_by_one = (Inference(Mesh(None), model, parameters, 1) for _ in range(2))
    wanted = at_once.forward(tokens)
    for token in tokens[0]:
        found = one_by_one.forward(token.reshape(1, 1))
    assert one_by_one.cache.nbytes == at_once.cache.nbytes == 2 * 2 * 8 * 12 * len(PROMPTS[3])
    return not np.allclose(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("gate", [None, *SAMPLED])
def test_what_is_kept_of_earlier_tokens_changes_nothing(gate: str | None) -> None:
    assert not differs(make(None, gate))


def test_with_a_capacity_a_text_depends_on_how_it_is_read() -> None:
    """The negative control: of 11 tokens that are read together some are dropped."""
    assert differs(moe_gpt(gate="switch", num_experts=EXPERTS, every=1, **ORDINARY))


def test_texts_do_not_depend_on_each_other() -> None:
    for number, prompt in enumerate(PROMPTS):
        (found,) = run("gshard", [prompt])
        both = zip(found.texts[0], alone("gshard").texts[number], strict=False)
        assert all(one == other for one, other in both)


def test_weights_read_are_those_of_the_experts_that_tokens_chose() -> None:
    """One text of a token each: two shared layers and one of four experts in each of 2 blocks."""
    (found,) = run("switch", PROMPTS[:1])
    inference = found.inference
    dense = sum(inference.dense_bytes(name, 1) for name in ("block0", "block1", "head"))
    one = 8 * (12 * 48 + 48 + 48 * 12 + 12)
    first, *others = found.counted
    assert others == [dense + 2 * 8 * 12 + 2 * one] * (TOKENS - 1)
    assert first > others[0]
    whole = sum(8 * size for size in inference.model.unit_sizes.values())
    assert others[0] < whole


def test_an_expert_more_is_noticed() -> None:
    """The negative control: a token of one pass is said to have another expert."""
    (found,) = run("switch", PROMPTS[:1])
    (first, *_) = mixtures(found.inference.model)
    log = first.expected
    assert log is not None
    log.merge(other_expert(log, 3, first.name))
    assert bytes_read(found.inference, log, 0) == found.counted  # of the same size
    log.parts[3, first.name].clear()
    log.add(3, first.name, 0, log.whole(0, first.name))
    assert bytes_read(found.inference, log, 0) != found.counted


def other_expert(log: RoutingLog, step: int, name: str) -> RoutingLog:
    """A log in which the tokens of a step have the experts behind theirs."""
    found, routing = RoutingLog(), log.whole(step, name)
    found.add(step, name, 0, replace(routing, expert=(routing.expert + 1) % EXPERTS))
    return found


def test_traffic_of_another_routing_is_noticed() -> None:
    """The negative control."""
    (first, _) = run("switch", PROMPTS[:2], expert=2)
    assert first.ledger is not None and first.table is not None and first.table.check()
    (layer, *_) = mixtures(first.inference.model)
    assert layer.expected is not None
    for step in range(5):
        wrong = other_expert(layer.expected, step, layer.name)
        layer.expected.parts[step, layer.name].clear()
        layer.expected.merge(wrong)
    table = TrafficTable(first.inference.traffic(), first.ledger, None, size=2)
    with pytest.raises(TrafficMismatch):
        table.check()


def test_a_checkpoint_of_any_layout_is_read(tmp_path: Path) -> None:
    """Parameters alone, and the biases of experts, of a trained model."""
    gates = gate_by_name("bias", {})
    common: dict[str, Any] = {"gate": gates, "num_experts": EXPERTS, "every": 1, **ORDINARY}

    def train(comm: Communicator) -> None:
        mesh = Mesh(comm, expert=2)
        model = moe_gpt(mesh=mesh, **common)
        trainer = Trainer(mesh, model, sharding=Sharding.zero(1, axes=("expert",)))
        trainer.start()
        rows = np.arange(2 * 8).reshape(2, 8)[comm.rank : comm.rank + 1]
        trainer.step(rows, rows + 1, total=16)
        checkpoint.save(trainer, tmp_path, 1)

    collectives.run(train, size=2)
    path = checkpoint.latest(tmp_path)
    assert path is not None

    def read(comm: Communicator) -> list[bytes]:
        mesh = Mesh(comm, data=1, tensor=comm.size)
        model = moe_gpt(mesh=mesh, **common)
        parameters = checkpoint.load_parameters(path, model, comm)
        assert all(layer.bias.any() for layer in mixtures(model))
        return generate(Inference(mesh, model, parameters, 1), PROMPTS[:1], 4)

    assert collectives.run(read, size=2) == 2 * collectives.run(read, size=1)
    other = moe_gpt(**common | {"hidden": 16})
    with pytest.raises(checkpoint.LoadFailed, match="in the checkpoint, but"):
        checkpoint.load_parameters(path, other, None)


# What is refused


def test_expert_choice_generates_no_text() -> None:
    with pytest.raises(ValueError, match="look at later tokens"):
        make(None, "expert-choice")


@pytest.mark.parametrize("axis", ["pipe", "context"])
def test_other_axes_are_refused(axis: str) -> None:
    def refused(comm: Communicator) -> None:
        mesh = Mesh(comm, **{axis: 2})
        model = gpt(mesh=mesh, **ORDINARY)
        with pytest.raises(ValueError, match=f"ranks along '{axis}' have no texts"):
            Inference(mesh, model, {}, 1)

    collectives.run(refused, size=2)


@pytest.mark.parametrize("dispatch", ["weights", "cheaper"])
def test_reads_of_gathered_weights_are_not_counted(dispatch: str) -> None:
    with pytest.raises(ValueError, match=f"the layer block0 has the dispatch {dispatch}, which"):
        run("switch", options={"dispatch": dispatch}, expert=2)


def test_a_model_of_images_generates_no_text() -> None:
    model = Model({"first": Linear(4, 4), "last": Linear(4, 4)})
    with pytest.raises(ValueError, match="without a layer embedding"):
        Inference(Mesh(None), model, {}, 1)


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([b"a"], {}, "there are 1 prompts for 2 texts"),
        ([b"a", b""], {}, "prompt 1 is empty"),
        ([b"a", b"b"], {"num_tokens": 0}, "at least 1"),
        ([b"a", b"b"], {"temperature": -1.0}, "from 0 on"),
        ([b"a", b"b" * 30], {"num_tokens": 3}, "a prompt of 30 bytes and 3 more are 33"),
    ],
)
def test_impossible_requests_are_refused(
    prompts: list[bytes], options: dict[str, Any], words: str
) -> None:
    model = make(None, None)
    parameters = {unit: model.draw(unit, SEED) for unit in model.units}
    inference = Inference(Mesh(None), model, parameters, 2)
    with pytest.raises(ValueError, match=words):
        generate(inference, prompts, **{"num_tokens": 3} | options)
    with pytest.raises(ValueError, match="positions for 32"):
        inference.forward(np.zeros((2, 33), np.int64))
    with pytest.raises(ValueError, match="0 texts"):
        Inference(Mesh(None), model, parameters, 0)
