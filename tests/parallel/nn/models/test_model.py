"""Models: their units, when these are gathered and complete, and the arrays they are bound to."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from parallel.layout import Stages
from parallel.nn import (
    Embedding,
    Gelu,
    Layer,
    LayerNorm,
    Linear,
    Model,
    Sequential,
    Step,
    Unembedding,
)
from parallel.pipeline import make
from parallel.sharding import Sharding
from tests.parallel.nn.bound_models import actions_of, bound, num_gathers


def test_a_layer_whose_name_has_a_dot_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a layer is named 'a\.b': a name must not contain a dot"):
        Model({"a.b": Linear(2, 2)})


def embedding() -> Embedding:
    return Embedding(6, 4, 3)


def head() -> Sequential:
    return Sequential({"norm": LayerNorm(3), "out": Unembedding(3, 6)})


def four_layers(ties: dict[str, str] | None = None) -> Model:
    layers = {"first": embedding(), "gelu": Gelu(), "mid": Linear(3, 3), "last": head()}
    return Model(layers, ties)


UNTIED = four_layers()
TIED = four_layers({"last.out.table": "first.token"})
NEIGHBORS = Model({"first": embedding(), "last": head()}, {"last.out.table": "first.token"})
WITHOUT = Model(  # tied, and nothing of its own is left
    {"first": embedding(), "mid": Linear(3, 3), "last": Unembedding(3, 6)},
    {"last.table": "first.token"},
)
BACKWARDS = four_layers({"first.token": "last.out.table"})
MODELS = [UNTIED, TIED, NEIGHBORS, WITHOUT, BACKWARDS]


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (UNTIED, {"first": ("first",), "gelu": (), "mid": ("mid",), "last": ("last",)}),
        (TIED, {"first": ("first",), "gelu": (), "mid": ("mid",), "last": ("last", "first")}),
        (NEIGHBORS, {"first": ("first",), "last": ("last", "first")}),
        (WITHOUT, {"first": ("first",), "mid": ("mid",), "last": ("first",)}),
        (BACKWARDS, {"first": ("first", "last"), "gelu": (), "mid": ("mid",), "last": ("last",)}),
    ],
)
def test_a_layer_names_the_units_that_it_uses(
    model: Model, wanted: dict[str, tuple[str, ...]]
) -> None:
    assert {layer: model.units_of(layer) for layer in model.layers} == wanted


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (UNTIED, {"first": ("first",), "gelu": (), "mid": ("mid",), "last": ("last",)}),
        (TIED, {"first": ("first",), "gelu": (), "mid": ("mid",), "last": ("last",)}),
        (NEIGHBORS, {"first": ("first",), "last": ("last",)}),
        (WITHOUT, {"first": ("first",), "mid": ("mid",), "last": ()}),
        (BACKWARDS, {"first": ("first", "last"), "gelu": (), "mid": ("mid",), "last": ()}),
    ],
)
def test_a_gradient_is_complete_at_the_first_layer_that_uses_it(
    model: Model, wanted: dict[str, tuple[str, ...]]
) -> None:
    stages = Stages(model, make("1f1b", 1, 1))
    assert {layer: stages.completed_units(layer) for layer in model.layers} == wanted


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (UNTIED, {"first": 1, "mid": 1, "last": 1}),
        (TIED, {"first": 2, "mid": 1, "last": 1}),
        (NEIGHBORS, {"first": 1, "last": 1}),
        (WITHOUT, {"first": 2, "mid": 1}),
        (BACKWARDS, {"first": 1, "mid": 1, "last": 2}),
    ],
)
def test_a_unit_is_gathered_as_often_as_layers_need_it(
    model: Model, wanted: dict[str, int]
) -> None:
    assert num_gathers(model) == wanted


def test_layers_run_in_the_order_given_and_back() -> None:
    assert UNTIED.active_layers() == list(UNTIED.layers) == ["first", "gelu", "mid", "last"]
    actions = actions_of(UNTIED, Sharding())
    for kind, names in (
        ("F", ["first", "gelu", "mid", "last"]),
        ("B", ["last", "mid", "gelu", "first"]),
    ):
        assert [each.name for each in actions if each.code == kind] == names


def random_model(rng: np.random.Generator) -> Model:
    """Layers in a row, some without parameters, with ties in both directions."""
    kinds = rng.integers(0, 4, rng.integers(2, 8))
    layers: dict[str, Layer] = {f"l{i}": Linear(2, 2) if k else Gelu() for i, k in enumerate(kinds)}
    names = [name for name, layer in layers.items() if layer.specs()]
    tied = [name for name in names if rng.random() < 0.4][: len(names) - 1]
    free = [name for name in names if name not in tied]
    return Model(layers, {f"{name}.weight": f"{rng.choice(free)}.weight" for name in tied})


@pytest.mark.parametrize("model", [*MODELS, *map(random_model, np.random.default_rng(0).spawn(60))])
def test_units_are_gathered_and_completed_as_a_pass_does_it(model: Model) -> None:
    """Both ways through the layers, holding what a layer and the next one use."""
    for names in (list(model.layers), list(reversed(model.layers))):
        times: Counter[str] = Counter()
        held: set[str] = set()
        for i, layer in enumerate(names):
            following = {unit for name in names[i + 1 : i + 2] for unit in model.units_of(name)}
            wanted = following.union(model.units_of(layer))
            times.update(wanted - held)
            held = (held | wanted) - ({*model.units_of(layer)} - following)
        assert times == Counter(num_gathers(model)) and not held
    open_until = {unit: layer for layer in reversed(model.layers) for unit in model.units_of(layer)}
    stages = Stages(model, make("1f1b", 1, 1))
    completed = {unit: layer for layer in model.layers for unit in stages.completed_units(layer)}
    assert completed == open_until and set(completed) == set(model.units)


@pytest.mark.parametrize(
    "ties",
    [
        {"last.out.tabel": "first.token"},
        {"last.out.table": "first.tokens"},
        {"last.out.table": "frist.token"},
        {"last.out.table": "first.position"},
        {"last.out.table": "last.out.table"},
        {"last.out.table": "first.token", "first.token": "last.out.table"},
    ],
)
def test_a_tie_of_what_is_not_there_is_refused(ties: dict[str, str]) -> None:
    here, there = next(iter(ties.items()))
    with pytest.raises(ValueError, match=f"'{here}' cannot be tied to '{there}'"):
        four_layers(ties)


def test_a_unit_is_the_parameters_one_after_the_other() -> None:
    model = TIED
    assert model.unit_sizes == {"first": 6 * 3 + 4 * 3, "mid": 3 * 3 + 3, "last": 3 + 3}
    assert model.num_parameters == 48
    assert list(model.units["last"]) == ["last.norm.gain", "last.norm.bias"]
    flats = {unit: np.arange(size) for unit, size in model.unit_sizes.items()}
    views = model.named(flats)
    assert list(views) == [
        "first.token",
        "first.position",
        "mid.weight",
        "mid.bias",
        "last.norm.gain",
        "last.norm.bias",
    ]
    np.testing.assert_array_equal(views["first.position"], np.arange(18, 30).reshape(4, 3))
    np.testing.assert_array_equal(views["mid.bias"], [9, 10, 11])
    views["mid.bias"][0] = 99
    assert flats["mid"][9] == 99


def test_a_draw_of_a_unit_is_the_draws_of_its_parameters() -> None:
    drawn = UNTIED.named({unit: UNTIED.draw(unit, 3) for unit in UNTIED.units})
    for name, value in drawn.items():
        np.testing.assert_array_equal(value, UNTIED.specs[name].draw(3, name))


def test_layers_work_on_the_arrays_they_are_bound_to() -> None:
    """Tied ones on the same."""
    model, values, slopes = bound(four_layers(TIED.ties))
    first, last = model.layers["first"], model.layers["last"]
    assert isinstance(last, Sequential)
    for tables, flat in (
        ([first.value["token"], last.layers["out"].value["table"]], values["first"]),
        ([first.gradient["token"], last.layers["out"].gradient["table"]], slopes["first"]),
    ):
        for table in tables:
            table[2, 1] += 1
            assert np.shares_memory(table, flat) and table.shape == (6, 3)
        np.testing.assert_array_equal(tables[0], tables[1])
    assert slopes["first"][2 * 3 + 1] == 2  # from both


def test_a_tied_layer_needs_both_units() -> None:
    model, values, _ = bound(four_layers(TIED.ties))
    x = np.zeros((1, 2, 3))
    model.bind("last", {"last": values["last"]})
    with pytest.raises(KeyError, match="table"):
        model.layers["last"].forward(x, Step())
    model.bind("last", {unit: values[unit] for unit in model.units_of("last")})
    model.layers["last"].forward(x, Step())
