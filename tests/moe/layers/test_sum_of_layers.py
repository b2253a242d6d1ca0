"""Layers side by side: what several of them keep is kept, moved and counted once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from moe.layers.sum_of_layers import SumOfLayers
from parallel import MemoryTracker
from parallel.nn import (
    ArraySpec,
    Gelu,
    Layer,
    LayerNorm,
    Linear,
    Model,
    Recompute,
    Residual,
    Sequential,
    Step,
)

DIM, ROWS, TOKENS = 6, 2, 5


def mlp() -> Layer:
    return Sequential({"up": Linear(DIM, 2 * DIM), "gelu": Gelu(), "down": Linear(2 * DIM, DIM)})


PARTS: dict[str, Callable[[], Layer]] = {
    "linear": lambda: Linear(DIM, DIM),
    "mlp": mlp,
    "gelu": Gelu,
    "norm": lambda: LayerNorm(DIM),
    "norm and linear": lambda: Sequential({"norm": LayerNorm(DIM), "linear": Linear(DIM, DIM)}),
    "linear and gelu": lambda: Sequential({"linear": Linear(DIM, DIM), "gelu": Gelu()}),
    "residual": lambda: Residual({"mlp": mlp()}),
    "recomputed": lambda: Recompute(mlp()),
    "sum": lambda: SumOfLayers({"one": Linear(DIM, DIM), "other": mlp()}),
}


def kept(layers: Mapping[str, Layer]) -> dict[str, tuple[int, int]]:
    """The bytes kept from forward to backward and between its halves: by formula, and counted."""
    layer, rng = SumOfLayers(layers), np.random.default_rng(0)
    model = Model({"only": layer})
    flats = [{unit: rng.normal(size=n) for unit, n in model.unit_sizes.items()} for _ in range(2)]
    model.bind("only", *flats)
    x, dy = rng.normal(size=(2, ROWS, TOKENS, DIM))
    saved_memory, rest_memory = MemoryTracker(), MemoryTracker()
    _, saved = layer.forward(x.copy(), Step())
    saved_memory.track("kept", saved)
    _, rest = layer.backward_input(dy.copy(), saved)
    rest_memory.track("kept", rest)
    made = layer.activation_bytes(ArraySpec(x.shape, 8))
    return {
        "saved": (made.saved, saved_memory.now["kept"]),
        "rest": (made.rest, rest_memory.now["kept"]),
    }


@pytest.mark.parametrize("one", PARTS)
@pytest.mark.parametrize("other", PARTS)
def test_what_two_layers_keep_is_counted_once(one: str, other: str) -> None:
    """From forward to backward, and from one half of backward to the other."""
    for formula, counted in kept({"one": PARTS[one](), "other": PARTS[other]()}).values():
        assert formula == counted


def test_what_three_layers_keep_is_counted_once() -> None:
    for formula, counted in kept({name: mlp() for name in "abc"}).values():
        assert formula == counted


def test_a_layer_that_does_not_tell_is_noticed() -> None:
    """The negative control: it keeps the derivative of its output, as the other one does."""

    class Silent(Linear):
        def activation_bytes(self, x: Any) -> Any:
            return super().activation_bytes(x)._replace(is_dy_in_rest=False)

    formula, counted = kept({"one": Silent(DIM, DIM), "other": Linear(DIM, DIM)})["rest"]
    assert formula == counted + 8 * ROWS * TOKENS * DIM


def test_a_copy_of_other_layers_saves_its_input_if_one_of_them_does() -> None:
    made = SumOfLayers({"one": Linear(DIM, DIM)}).with_layers(
        {"one": LayerNorm(DIM), "other": mlp()}
    )
    assert made.saves_input and isinstance(made, SumOfLayers)
    assert not made.with_layers({"one": LayerNorm(DIM)}).saves_input
