"""The GPT that ranks divide: loss, gradients, bytes and calls are those of one rank's GPT."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from array_api_compat import numpy as host

import collectives
from collectives import Communicator
from parallel import MemoryTracker, Mesh, Recipe, TrafficTable, Trainer
from parallel.nn import ArraySpec, Model, Step, gpt
from parallel.optim import dtype_of
from tests.fakes.arrays import FAKE
from tests.parallel.nn.bound_models import Bound, Values
from tests.parallel.nn.tensor.split_layers import bound_by_name, near

SIZES: dict[str, Any] = {"num_layers": 2, "hidden": 6, "num_heads": 3, "context": 5}
ROWS, LENGTH = 3, 5
FORMS = [None, "keep", "gather"]
each_form = pytest.mark.parametrize("form", FORMS)


def batch() -> tuple[Values, Values]:
    inputs, targets = np.random.default_rng(1).integers(0, 256, (2, ROWS, LENGTH))
    return inputs, targets


class End(NamedTuple):
    """Of one rank."""

    loss: float
    gradients: dict[str, Values]
    made: Bound
    saved: dict[str, int]


def pass_through(model: Model, dtype: str) -> End:
    """Forward and backward through all layers, each in its phase."""
    made, (x, targets), memory = bound_by_name(model, dtype), batch(), MemoryTracker()
    step, held, saved_bytes = Step(targets, targets.size), [], {}
    for name, layer in model.layers.items():
        with collectives.phase(f"forward/{name}"):
            x, saved = layer.forward(x, step)
        before = memory.now["saved"]
        held.append(memory.track("saved", saved))
        saved_bytes[name] = memory.now["saved"] - before
    loss, dy = x, 1.0
    for name, layer in reversed(model.layers.items()):
        with collectives.phase(f"backward/{name}"):
            dy = layer.backward(dy, held.pop())
    return End(float(loss), made.named_gradients(), made, saved_bytes)


@cache
def one_rank(dtype: str, is_tied: bool) -> End:
    return pass_through(gpt(**SIZES, is_tied=is_tied), dtype)


def check(axes: dict[str, int], form: str | None, dtype: str = "float64", **options: Any) -> None:
    """All ranks compute the whole batch, so those along other axes than "tensor" are alike."""
    is_tied = options.get("is_tied", False)
    width, size = dtype_of(dtype).itemsize, int(np.prod(list(axes.values())))

    def fn(comm: Communicator) -> tuple[End, list[Any], TrafficTable | None]:
        mesh = Mesh(comm, **axes)
        mesh["tensor"]
        model = gpt(**SIZES, mesh=mesh, sequence_parallel=form, **options)
        with comm.record() as ledger:
            end = pass_through(model, dtype)
        record, table = ledger.gather(), None
        specs = [ArraySpec.tokens(ROWS, LENGTH, width, rank=rank) for rank in range(size)]
        if record is not None:
            table = TrafficTable(calls_of(model, specs), record, None, size=size)
        return end, [model.activation_bytes(x) for x in specs], table

    ends = collectives.run(fn, size=size)
    wanted, sums = one_rank(dtype, is_tied), dict[str, Any]()
    for end, _, _ in ends:
        near(end.loss, wanted.loss, dtype, "loss")
        model = end.made.model
        for name, x in end.gradients.items():
            if model.specs[name].partial:
                sums[name] = sums.get(name, 0) + x
            else:
                box = model.specs[name].box(model.mesh)
                near(x, wanted.gradients[name][box.slices], dtype, name)
        for _, formulas, _ in ends:  # those of every rank for this one
            formula = {name: each.saved for name, each in formulas[model.mesh.rank].items()}
            assert formula == end.saved
    for name, x in sums.items():
        near(x / (size // axes["tensor"]), wanted.gradients[name], dtype, name)
    assert ends[0][2] is not None and (size == 1 or ends[0][2].check())


def calls_of(model: Model, specs: list[ArraySpec]) -> list[Any]:
    """What all groups of ranks send, each as its first rank predicts it."""
    found = []
    for group in model.mesh.ranks("tensor"):
        for name, traffic in model.traffic(specs[group[0]]).items():
            for phase, calls in zip(("forward", "backward"), traffic, strict=True):
                label = f"{phase}/{name}"
                found += [replace(call, phase=label, groups=(group,)) for call in calls]
    return found


@each_form
@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.slow
def test_loss_gradients_bytes_and_calls_are_those_of_one_rank_and_formulas(
    tensor: int, is_tied: bool, form: str | None
) -> None:
    check({"tensor": tensor}, form, is_tied=is_tied)


@each_form
def test_in_float32_loss_and_gradients_are_those_of_one_rank(form: str | None) -> None:
    check({"tensor": 3}, form, "float32")


@each_form
def test_formulas_are_those_of_any_rank_of_a_larger_mesh(form: str | None) -> None:
    check({"data": 2, "tensor": 3}, form)


def test_blocks_that_share_parameters_add_up_their_gradients() -> None:
    """All use the first one's parameters, which add up the gradients of both."""
    alone = pass_through(gpt(**SIZES, is_shared=True), "float64")

    def fn(comm: Communicator) -> None:
        mesh = Mesh(comm, tensor=2)
        end = pass_through(gpt(**SIZES, is_shared=True, mesh=mesh), "float64")
        for name, x in end.gradients.items():
            box = end.made.model.specs[name].box(mesh)
            near(x, alone.gradients[name][box.slices], "float64", name)

    collectives.run(fn, size=2)


def test_an_axis_of_one_rank_costs_nothing() -> None:
    def fn(comm: Communicator) -> None:
        model = gpt(**SIZES, mesh=Mesh(comm, data=2, tensor=1), sequence_parallel="keep")
        tokens = ArraySpec.tokens(ROWS, LENGTH, 8)
        assert not any(any(each) for each in model.traffic(tokens).values())
        plain = gpt(**SIZES).activation_bytes(tokens)
        assert model.activation_bytes(tokens) == plain

    collectives.run(fn, size=2)


@pytest.mark.parametrize(
    ("form", "forward", "backward"),
    [
        (None, {"all_reduce": 2}, {"all_reduce": 2}),
        ("keep", {"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 2, "reduce_scatter": 2}),
        ("gather", {"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 4, "reduce_scatter": 2}),
    ],
)
def test_a_block_makes_the_calls_of_the_papers(
    form: str | None, forward: dict[str, int], backward: dict[str, int]
) -> None:
    """And each of s b h elements."""

    def fn(comm: Communicator) -> None:
        mesh = Mesh(comm, tensor=2)
        model = gpt(**SIZES, mesh=mesh, sequence_parallel=form)
        for calls, wanted in zip(
            model.traffic(ArraySpec.tokens(ROWS, LENGTH, 8))["block1"],
            (forward, backward),
            strict=True,
        ):
            names = [call.collective for call in calls]
            assert {name: names.count(name) for name in names} == wanted
            assert {int(np.sum(call.counts)) for call in calls} == {ROWS * LENGTH * 6}

    collectives.run(fn, size=2)


def test_recomputed_blocks_send_twice_forward() -> None:
    """Two more all-reduces with full recomputation."""

    def fn(comm: Communicator) -> None:
        mesh = Mesh(comm, tensor=2)
        model = gpt(**SIZES, mesh=mesh, recompute=["block*"])
        forward, backward = model.traffic(ArraySpec.tokens(ROWS, LENGTH, 8))["block0"]
        assert (len(forward), len(backward)) == (2, 4)

    collectives.run(fn, size=2)
    check({"tensor": 2}, None, recompute=["block*"])
    check({"tensor": 3}, "gather", recompute=["block*.attention.heads"])


def test_another_form_of_sequence_parallelism_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence_parallel is 'ring': it must be one of None"):
        gpt(**SIZES, sequence_parallel="ring")


@each_form
@pytest.mark.parametrize("int8", [None, "rowwise"])
@pytest.mark.slow
def test_on_a_device_the_bits_are_the_same(form: str | None, int8: str | None) -> None:
    """No array crosses to the host on the way; messages are those of the library."""

    def fn(comm: Communicator) -> list[list[float]]:
        losses = []
        for xp in (host, FAKE):
            mesh = Mesh(comm, tensor=3)
            model = gpt(**SIZES, mesh=mesh, sequence_parallel=form)
            up: Any = model.layers["block0"]
            up.layers["mlp"].layers["up"].linear.int8 = int8
            trainer = Trainer(mesh, model, Recipe(xp=xp))
            trainer.start()
            losses.append([trainer.step(*batch(), ROWS * LENGTH) for _ in range(3)])
        return losses

    for on_host, on_device in collectives.run(fn, size=3):
        assert on_host == on_device and on_host[2] < on_host[0]
