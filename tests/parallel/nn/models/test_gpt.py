"""The GPT as a whole: gradients end to end, what a position may see, names, sizes, first values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from parallel import MemoryTracker
from parallel.layout import Stages
from parallel.nn import Gelu, Layer, LayerNorm, Model, Sequential, Step, gpt
from parallel.optim import dtype_of
from parallel.pipeline import make
from tests.parallel.nn.bound_models import (
    Bound,
    Values,
    along,
    bound,
    cross_entropy,
    num_gathers,
    spec_of,
    without_loss,
)

each_tie = pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
SMALL = {"num_layers": 2, "hidden": 6, "num_heads": 2, "context": 5}


def tokens(rows: int, context: int = 5, seed: int = 1) -> tuple[Values, Values]:
    """Inputs and targets."""
    inputs, targets = np.random.default_rng(seed).integers(0, 256, (2, rows, context))
    return inputs, targets


def loss_of(made: Bound, inputs: Values, targets: Values) -> float:
    return cross_entropy(made.whole.forward(inputs, Step())[0], targets, targets.size)[0]


def add_gradients(made: Bound, inputs: Values, targets: Values, total: int) -> float:
    """Of these rows' part of the loss; that part."""
    logits, saved = made.whole.forward(inputs, Step())
    loss, slope = cross_entropy(logits, targets, total)
    made.whole.backward(slope, saved)
    return loss


# Gradients


def check_gradients(model: Model) -> None:
    """Every parameter's, along random directions."""
    made, rng, batch = bound(model), np.random.default_rng(2), tokens(3)
    add_gradients(made, *batch, batch[1].size)
    slopes = made.named_gradients()
    for name, value in made.named_values().items():
        for _ in range(2):
            way = rng.standard_normal(value.shape)
            wanted = along(lambda: loss_of(made, *batch), value, way)
            found = float(np.sum(way * slopes[name]))
            assert found == pytest.approx(wanted, rel=1e-6, abs=1e-8), name


@each_tie
def test_gradients_are_finite_differences(is_tied: bool) -> None:
    check_gradients(gpt(**SMALL, is_tied=is_tied))


class FlatNorm(LayerNorm):
    """As if the variance did not depend on the input."""

    def backward(self, dy: Any, saved: Any) -> Any:
        super().backward(dy, saved)
        d = dy * self.value["gain"]
        return saved[1] * (d - d.mean(axis=-1, keepdims=True))


class StraightGelu(Gelu):
    def backward(self, dy: Any, saved: Any) -> Any:
        return dy


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("head", "norm"), FlatNorm(6)),
        (("block0", "mlp", "gelu"), StraightGelu()),
        (("block1", "attention", "norm"), FlatNorm(6)),
    ],
)
def test_a_wrong_backward_within_is_noticed(path: tuple[str, ...], wrong: Layer) -> None:
    """The negative control."""
    model = gpt(**SMALL)
    layers = model.layers
    for name in path[:-1]:
        inner = layers[name]
        assert isinstance(inner, Sequential)
        layers = inner.layers
    layers[path[-1]] = wrong
    with pytest.raises(AssertionError):
        check_gradients(model)


def test_a_tied_table_gets_both_gradients() -> None:
    """The embedding's and the head's, when the untied ones have the same values."""
    tied, untied = bound(gpt(**SMALL, is_tied=True)), bound(gpt(**SMALL))
    for name, value in untied.named_values().items():
        key = "embedding.token" if name == "head.out.table" else name
        value[...] = tied.named_values()[key]
    losses = [add_gradients(made, *tokens(3), 15) for made in (tied, untied)]
    assert losses[0] == losses[1]
    wanted = untied.named_gradients()
    wanted["embedding.token"] = wanted["embedding.token"] + wanted.pop("head.out.table")
    for name, slope in tied.named_gradients().items():
        np.testing.assert_allclose(slope, wanted[name], rtol=1e-13, atol=1e-16, err_msg=name)


@each_tie
def test_micro_batches_add_up_to_the_batch(is_tied: bool) -> None:
    """However uneven, and one of no rows too."""
    whole, parts = (bound(gpt(**SMALL, is_tied=is_tied)) for _ in range(2))
    inputs, targets = tokens(7)
    loss = add_gradients(whole, inputs, targets, 35)
    spans = [slice(0, 4), slice(4, 4), slice(4, 5), slice(5, 7)]
    losses = [add_gradients(parts, inputs[s], targets[s], 35) for s in spans]
    assert losses[1] == 0 and sum(losses) == pytest.approx(loss, rel=1e-14)
    for unit, slope in whole.gradients.items():
        np.testing.assert_allclose(parts.gradients[unit], slope, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_a_batch_of_no_rows_has_no_loss_and_no_gradient(dtype: str) -> None:
    made = bound(gpt(**SMALL), dtype)
    assert add_gradients(made, *tokens(0), 1) == 0
    assert not any(slope.any() for slope in made.gradients.values())


# What a position sees


def test_a_later_token_changes_no_earlier_logit() -> None:
    made, (inputs, _) = bound(gpt(**SMALL)), tokens(3)
    before, _ = made.whole.forward(inputs, Step())
    for t in range(5):
        changed = inputs.copy()
        changed[:, t] = (changed[:, t] + 1) % 256
        after, _ = made.whole.forward(changed, Step())
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(axis=-1).all()


def test_the_first_tokens_alone_have_the_same_logits() -> None:
    made, (inputs, _) = bound(gpt(**SMALL)), tokens(3)
    whole, _ = made.whole.forward(inputs, Step())
    for context in range(1, 5):
        short, _ = made.whole.forward(inputs[:, :context], Step())
        np.testing.assert_allclose(short, whole[:, :context], rtol=1e-12, atol=1e-13)


def test_rows_do_not_see_each_other() -> None:
    made, (inputs, _) = bound(gpt(**SMALL)), tokens(3)
    whole, _ = made.whole.forward(inputs, Step())
    for row in range(3):
        lone, _ = made.whole.forward(inputs[row : row + 1], Step())
        np.testing.assert_allclose(lone[0], whole[row], rtol=1e-12, atol=1e-13)


# Names and sizes


def test_the_units_have_the_parameters_of_a_gpt() -> None:
    model = gpt(num_layers=2, hidden=8, num_heads=2, context=6)
    assert list(model.units) == ["embedding", "block0", "block1", "head"]
    shapes = {
        name.removeprefix("block1."): spec.shape for name, spec in model.units["block1"].items()
    }
    assert shapes == {
        "attention.norm.gain": (8,),
        "attention.norm.bias": (8,),
        "attention.qkv.weight": (8, 3, 2, 4),
        "attention.qkv.bias": (3, 2, 4),
        "attention.out.weight": (8, 8),
        "attention.out.bias": (8,),
        "mlp.norm.gain": (8,),
        "mlp.norm.bias": (8,),
        "mlp.up.weight": (8, 32),
        "mlp.up.bias": (32,),
        "mlp.down.weight": (32, 8),
        "mlp.down.bias": (8,),
    }


@each_tie
@pytest.mark.parametrize(
    ("layers", "h", "heads", "context"), [(0, 4, 1, 3), (1, 8, 2, 6), (3, 12, 3, 5)]
)
def test_the_number_of_parameters_is_that_of_the_formula(
    layers: int, h: int, heads: int, context: int, is_tied: bool
) -> None:
    """12 h^2 + 13 h a block, as GPT-2's has."""
    model = gpt(num_layers=layers, hidden=h, num_heads=heads, context=context, is_tied=is_tied)
    tables = 256 * h * (1 if is_tied else 2)
    assert model.num_parameters == tables + context * h + layers * (12 * h * h + 13 * h) + 2 * h


def test_a_tied_head_uses_the_embeddings_unit() -> None:
    model = gpt(**SMALL, is_tied=True)
    assert model.units_of("head") == ("head", "embedding")
    stages = Stages(model, make("1f1b", 1, 1))
    assert stages.completed_units("head") == ("head",)
    assert stages.completed_units("embedding") == ("embedding",)
    assert num_gathers(model) == {"embedding": 2, "block0": 1, "block1": 1, "head": 1}
    assert num_gathers(gpt(**SMALL | {"num_layers": 0}, is_tied=True)) == {
        "embedding": 1,
        "head": 1,
    }


@pytest.mark.parametrize(
    ("name", "size", "least"),
    [
        ("num_layers", -1, 0),
        ("hidden", 0, 1),
        ("hidden", -6, 1),
        ("num_heads", 0, 1),
        ("num_heads", -2, 1),
        ("context", 0, 1),
        ("context", -3, 1),
    ],
)
def test_sizes_that_make_no_model_are_refused(name: str, size: int, least: int) -> None:
    """And the least that does make one is not."""
    with pytest.raises(ValueError, match=f"^{name} is {size}: it must be at least {least}$"):
        gpt(**SMALL | {name: size})
    ones = {"num_layers": 1, "hidden": 1, "num_heads": 1, "context": 1}
    assert gpt(**ones | {name: least}).num_parameters > 0


@pytest.mark.parametrize("heads", [3, 8])
def test_heads_must_divide_the_width(heads: int) -> None:
    with pytest.raises(ValueError, match=f"{heads} heads do not divide a width of 4"):
        gpt(hidden=4, num_heads=heads)


# First values


def test_first_values_depend_on_seed_and_name_alone() -> None:
    """Not on how many layers there are, or on who draws what first."""
    small, large = gpt(**SMALL | {"num_layers": 1}), gpt(**SMALL | {"num_layers": 3})
    mine = small.named({unit: small.draw(unit, 5) for unit in small.units})
    theirs = large.named({unit: large.draw(unit, 5) for unit in reversed(large.units)})
    for name, value in mine.items():
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            # What adds to the residual stream is drawn the smaller the more of it there is.
            np.testing.assert_allclose(theirs[name] * math.sqrt(3), value, rtol=1e-15)
        else:
            np.testing.assert_array_equal(theirs[name], value)


def test_no_two_parameters_begin_alike() -> None:
    model = gpt(**SMALL)
    named = model.named({unit: model.draw(unit, 0) for unit in model.units})
    firsts = [value.ravel()[0] for value in named.values() if np.ptp(value) > 0]
    assert len(set(firsts)) == len(firsts) == 3 + 2 * 4  # tables, and four matrices a block
    assert not np.array_equal(model.draw("block0", 0), model.draw("block0", 1))


@pytest.mark.parametrize(("is_tied", "variance"), [(False, 0.01), (True, 0.01 * 64)])
def test_the_first_loss_is_that_of_the_formula(is_tied: bool, variance: float) -> None:
    """Logits of normal distribution cost half their variance more than a uniform guess.

    A row of the head's table has length 0.1, one of the embedding's 0.1 sqrt(width).
    """
    model = gpt(num_layers=2, hidden=64, context=32, is_tied=is_tied)
    values = {unit: model.draw(unit, 0) for unit in model.units}
    for layer in model.layers:
        model.bind(layer, values)
    inputs, targets = tokens(8, 32)
    loss, _ = cross_entropy(without_loss(model).forward(inputs, Step())[0], targets, targets.size)
    assert loss == pytest.approx(math.log(256) + variance / 2, abs=0.05)


# Memory and precision


@each_tie
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_a_gpt_keeps_what_is_alive_after_forward(dtype: str, is_tied: bool) -> None:
    """Layer by layer, and all together: nothing is kept twice."""
    made, (x, targets) = bound(gpt(**SMALL, is_tied=is_tied), dtype), tokens(3)
    formula = made.model.activation_bytes(spec_of(x, dtype_of(dtype).itemsize))
    memory, held = MemoryTracker(), []
    for name, layer in made.model.layers.items():
        nbytes = formula[name].saved
        x, saved = layer.forward(x, Step(targets))
        before = memory.now["activations"]
        held.append(memory.track("activations", saved))
        assert memory.now["activations"] - before == nbytes
    del saved
    held.clear()
    assert memory.now["activations"] == 0
    assert memory.peak["activations"] == sum(each.saved for each in formula.values()) > 0


@pytest.mark.parametrize(
    ("dtype", "close"), [("float32", 2e-6), ("float16", 2e-3), ("bfloat16", 2e-2)]
)
def test_smaller_dtypes_are_close_to_float64(dtype: str, close: float) -> None:
    """Loss and every gradient, and all gradients have the dtype."""
    small, wide = bound(gpt(**SMALL), dtype), bound(gpt(**SMALL))
    for unit, x in small.values.items():
        wide.values[unit][...] = x
    losses = [add_gradients(made, *tokens(20), 100) for made in (small, wide)]
    assert losses[0] == pytest.approx(losses[1], rel=close)
    for name, slope in small.named_gradients().items():
        wanted = wide.named_gradients()[name]
        assert slope.dtype == dtype_of(dtype)
        error = np.linalg.norm(slope.astype(np.float64) - wanted)
        assert error < 4 * close * np.linalg.norm(wanted) + close * 1e-3, name


def test_forward_again_gives_the_same_to_the_last_bit() -> None:
    """What recomputation stands on."""
    made, (inputs, _) = bound(gpt(**SMALL), "float32"), tokens(3)
    first, again = (made.whole.forward(inputs, Step())[0] for _ in range(2))
    np.testing.assert_array_equal(first, again)
