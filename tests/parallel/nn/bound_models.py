"""Models bound to arrays of their own, and derivatives to compare theirs with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from parallel.layout import Layout, RankView
from parallel.mesh import Mesh
from parallel.nn import ArraySpec, CrossEntropy, Layer, Model, Sequential, Step
from parallel.optim import dtype_of
from parallel.sharding import Sharding
from parallel.step import Action, Unshard, lower

Values: TypeAlias = np.ndarray[Any, Any]

STEP = 1e-6
CLOSE = 1e-7  # of a central difference with this step, on values near 1, in float64


class Bound(NamedTuple):
    """A model, and the flat arrays that all its layers work on."""

    model: Model
    values: dict[str, Values]
    gradients: dict[str, Values]

    @property
    def whole(self) -> Sequential:
        """All layers but the loss as one."""
        return without_loss(self.model)

    def named_values(self) -> dict[str, Values]:
        return self.model.named(self.values)

    def named_gradients(self) -> dict[str, Values]:
        return self.model.named(self.gradients)


def bound(model: Model, dtype: str = "float64", seed: int = 7) -> Bound:
    """With random values everywhere: in the biases too, which begin at zero."""
    rng, values = np.random.default_rng(seed), {}
    for unit, size in model.unit_sizes.items():
        drawn = model.draw(unit, seed) + 0.3 * rng.standard_normal(size)
        values[unit] = drawn.astype(dtype_of(dtype))
    gradients = {unit: np.zeros_like(x) for unit, x in values.items()}
    for layer in model.layers:
        model.bind(layer, values, gradients)
    return Bound(model, values, gradients)


def spec_of(x: Values, width: int) -> ArraySpec:
    """What is known of the input of a layer before it exists."""
    return ArraySpec(x.shape, width, are_tokens=x.dtype.kind == "i")


def without_loss(model: Model) -> Sequential:
    """The layers that make the logits, as one."""
    layers = model.layers.items()
    return Sequential({name: x for name, x in layers if not isinstance(x, CrossEntropy)})


def cross_entropy(
    logits: Values, targets: Values, total: int, scale: float = 1.0
) -> tuple[float, Values]:
    """The loss, and `scale` times its derivative by the logits."""
    layer = CrossEntropy()
    loss, saved = layer.forward(logits, Step(targets, total, loss_scale=scale))
    return loss, layer.backward(1.0, saved)


def alone(layer: Layer, dtype: str = "float64", seed: int = 7) -> Bound:
    """A model of this layer alone, which is named "only"."""
    return bound(Model({"only": layer}), dtype, seed)


def in_float32(layer: Layer, like: Bound) -> Bound:
    """A layer with the values of `like`, which are of two bytes, but in float32."""
    made = alone(layer, "float32")
    for unit, x in like.values.items():
        made.values[unit][...] = x
    return made


def num_gathers(model: Model) -> dict[str, int]:
    """How often ZeRO-3 gathers each unit in a forward pass."""
    actions = actions_of(model, Sharding.zero(3))
    gathered = [each for each in actions if isinstance(each, Unshard)]
    forward, backward = (
        Counter(each.part for each in gathered if each.phase == phase)
        for phase in ("forward", "backward")
    )
    assert forward == backward
    return dict(forward)


def actions_of(model: Model, sharding: Sharding) -> list[Action]:
    """What one rank does in a step of one micro-batch."""
    return lower(RankView(Layout(Mesh(None), model, sharding=sharding), 0))


# Derivatives


def numerical(f: Callable[[], float], x: Values) -> Values:
    """df/dx by central differences; x is changed in place and put back."""
    slope = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        way = np.zeros_like(x)
        way[i] = 1
        slope[i] = along(f, x, way)
    return slope


def along(f: Callable[[], float], x: Values, way: Values) -> float:
    """The derivative of f along a direction in x."""
    with moved(x, STEP * way):
        above = f()
    with moved(x, -STEP * way):
        below = f()
    return (above - below) / (2 * STEP)


@contextmanager
def moved(x: Values, by: Values) -> Iterator[None]:
    """x + by in x's place."""
    kept = x.copy()
    x += by
    try:
        yield
    finally:
        x[...] = kept


def check_gradients(layer: Layer, x: Values, dy: Values) -> None:
    """Input's and parameters' derivatives of the output weighted by dy."""
    lone = alone(layer)

    def loss() -> float:
        return float(np.sum(dy * layer.forward(x, Step())[0]))

    dx = layer.backward(dy, layer.forward(x, Step())[1])
    if x.dtype.kind == "f":
        np.testing.assert_allclose(dx, numerical(loss, x), rtol=CLOSE, atol=CLOSE)
    for name, slope in lone.named_gradients().items():
        wanted = numerical(loss, lone.named_values()[name])
        np.testing.assert_allclose(slope, wanted, rtol=CLOSE, atol=CLOSE, err_msg=name)
