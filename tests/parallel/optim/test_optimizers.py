"""Optimizers against the papers' algorithms, written out for one number."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parallel.optim import SGD, Adam, AdamW, Optimizer, dtype_of, optimizers

SHAPES = [(1,), (7,), (2 * optimizers.PIECE + 3,), (3, 4)]
NUM_STEPS = 10


def scalar_sgd(x: float, slopes: list[float], *, lr: float, momentum: float) -> float:
    """Polyak 1964's heavy ball, with the rate outside of the velocity."""
    v = 0.0
    for g in slopes:
        v = momentum * v + g
        x -= lr * v
    return x


def scalar_adam(
    x: float,
    slopes: list[float],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
) -> float:
    """Kingma & Ba 2015, algorithm 1; the weight decay of Loshchilov & Hutter 2019."""
    m = v = 0.0
    for t, g in enumerate(slopes, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        x -= lr * (m_hat / (math.sqrt(v_hat) + eps) + weight_decay * x)
    return x


ADAM = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6}
PAPERS: dict[str, tuple[type[Optimizer], Callable[..., float], dict[str, Any]]] = {
    "sgd": (SGD, scalar_sgd, {"lr": 0.01, "momentum": 0.0}),
    "sgd with momentum": (SGD, scalar_sgd, {"lr": 0.01, "momentum": 0.9}),
    "adam": (Adam, scalar_adam, ADAM),
    "adam with decay": (Adam, scalar_adam, ADAM | {"weight_decay": 0.3}),
    "adamw": (AdamW, scalar_adam, ADAM | {"weight_decay": 0.3}),
}
each_kind = pytest.mark.parametrize("kind", [SGD, Adam, AdamW])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PAPERS)
def test_steps_of_an_optimizer_are_the_papers(name: str, shape: tuple[int, ...]) -> None:
    kind, scalar, options = PAPERS[name]
    rng = np.random.default_rng(1)
    x, slopes = rng.standard_normal(shape), rng.standard_normal((NUM_STEPS, *shape))
    start, optimizer = x.copy(), kind({"x": x}, **options)
    for slope in slopes:
        optimizer.step({"x": slope})
    for i in [(0,) * len(shape), tuple(n - 1 for n in shape), np.unravel_index(x.size // 2, shape)]:
        wanted = scalar(float(start[i]), [float(slope[i]) for slope in slopes], **options)
        assert x[i] == pytest.approx(wanted, rel=1e-13)
    assert optimizer.steps == NUM_STEPS


MANY_STEPS = 120  # after which Adam's corrections for the beginning of its means still tell


def after_many_steps(name: str, kind: type[Optimizer]) -> tuple[float, float]:
    """Where one number is then: by the class, and by the paper."""
    _, scalar, options = PAPERS[name]
    slopes = np.random.default_rng(6).standard_normal(MANY_STEPS).tolist()
    x = np.ones(1)
    optimizer = kind({"x": x}, **options)
    for slope in slopes:
        optimizer.step({"x": np.array([slope])})
    return x[0], scalar(1.0, slopes, **options)


@pytest.mark.parametrize("name", PAPERS)
def test_many_steps_are_the_papers_too(name: str) -> None:
    found, wanted = after_many_steps(name, PAPERS[name][0])
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("most", [50, 100])
@pytest.mark.parametrize("name", ["adam", "adam with decay", "adamw"])
def test_steps_that_are_not_counted_would_be_noticed(name: str, most: int) -> None:
    """The negative control: the count of steps stands still from there on."""

    class StandsStill(PAPERS[name][0]):  # type: ignore[misc]
        def _update(self, *arrays: Any) -> None:
            self.steps = min(self.steps, most)
            super()._update(*arrays)

    found, wanted = after_many_steps(name, StandsStill)
    assert found != pytest.approx(wanted, rel=1e-6)


def test_the_papers_of_the_optimizers_differ() -> None:
    """The negative control: each option tells, so that no two of them could be mixed up."""
    slopes = np.random.default_rng(1).standard_normal(NUM_STEPS).tolist()
    ends = {scalar(1.0, slopes, **options) for _, scalar, options in PAPERS.values()}
    assert len(ends) == 4  # AdamW is Adam with decay
    for option in ({"lr": 0.011}, {"betas": (0.81, 0.95)}, {"betas": (0.8, 0.96)}, {"eps": 2e-6}):
        assert scalar_adam(1.0, slopes, **ADAM | option) not in ends


def test_adamw_decays_by_a_hundredth_and_adam_does_not() -> None:
    ends = {}
    for kind in (Adam, AdamW):
        x = np.full(1, 2.0)
        kind({"x": x}, lr=0.5).step({"x": np.zeros(1)})
        ends[kind] = x[0]
    assert ends == {Adam: 2.0, AdamW: 2 * (1 - 0.5 * 0.01)}


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_the_first_step_is_the_rate_whatever_the_gradient(kind: type[Adam]) -> None:
    x = np.zeros(2)
    kind({"x": x}, lr=0.5).step({"x": np.array([1e-3, -1e3])})
    np.testing.assert_allclose(x, [-0.5, 0.5], rtol=1e-4)


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_gradient_of_zero_changes_nothing(kind: type[Optimizer]) -> None:
    x = np.ones(3)
    optimizer = kind({"x": x})
    for _ in range(3):
        optimizer.step({"x": np.zeros(3)})
    np.testing.assert_array_equal(x, 1)


# Options

LR = "lr is {}: it must be at least 0 and finite"
BETA = "the {} of betas is {}: it must be at least 0 and less than 1"
EPSILON = "eps is {}: it must be more than 0 and finite"
MOMENTUM = "momentum is {}: it must be at least 0 and less than 1"
DECAY = "weight_decay is {}: it must be at least 0 and finite"
NAN, INF = math.nan, math.inf
REFUSED: list[tuple[type[Optimizer], dict[str, Any], str]] = [
    *((kind, {"lr": x}, LR.format(x)) for kind in (SGD, Adam, AdamW) for x in (-1, NAN, INF, -INF)),
    *((SGD, {"momentum": x}, MOMENTUM.format(x)) for x in (-0.1, 1, 1.5, NAN, INF)),
    *((Adam, {"betas": (x, 0.9)}, BETA.format("first", x)) for x in (-0.1, 1.0, 2.0, NAN, INF)),
    *((Adam, {"betas": (0.9, x)}, BETA.format("second", x)) for x in (-0.1, 1.0, 2.0, NAN, INF)),
    *((Adam, {"eps": x}, EPSILON.format(x)) for x in (-1, 0, NAN, INF)),
    *((AdamW, {"weight_decay": x}, DECAY.format(x)) for x in (-0.1, NAN, INF)),
    (AdamW, {"betas": (1.0, 0.9)}, BETA.format("first", 1.0)),
]


@pytest.mark.parametrize(("kind", "options", "said"), REFUSED)
def test_options_without_a_meaning_are_refused(
    kind: type[Optimizer], options: dict[str, Any], said: str
) -> None:
    """At once, before any state is made."""
    made: list[Any] = []
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        kind({"x": np.ones(1)}, make_state=made.append, **options)
    assert not made


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SGD, {"lr": 0.0, "momentum": 0.0}),
        (SGD, {"lr": 1e3, "momentum": 0.999999}),
        (Adam, {"lr": 0, "betas": (0, 0), "eps": 1e-300, "weight_decay": 0}),
        (AdamW, {"lr": 1e3, "betas": (0.999999, 0.999999), "eps": 1e3, "weight_decay": 1e3}),
    ],
)
def test_options_at_the_edge_have_a_meaning(kind: type[Optimizer], options: dict[str, Any]) -> None:
    """The negative control: not everything is refused."""
    x = np.ones(2)
    optimizer = kind({"x": x}, **options)
    for _ in range(3):
        optimizer.step({"x": np.ones(2)})
    assert np.isfinite(x).all() and (x == 1).all() == (options["lr"] == 0)


# Scale


def run(
    kind: type[Optimizer], slopes: Any, scale: float = 1.0, dtype: Any = np.float64
) -> list[Any]:
    """All that an update changes, after some."""
    rng = np.random.default_rng(3)
    optimizer = kind({"x": rng.standard_normal(slopes.shape[1:]).astype(dtype)})
    for slope in slopes:
        optimizer.step({"x": slope}, scale)
    return optimizer.arrays()


@each_kind
@pytest.mark.parametrize("scale", [2.0**-16, 0.5, 1 / 3, 0.1234, 7.0])
def test_a_scale_multiplies_the_gradient(kind: type[Optimizer], scale: float) -> None:
    """To the last bit, in states too."""
    slopes = np.random.default_rng(4).standard_normal((5, 9))
    for scaled, wanted in zip(run(kind, slopes, scale), run(kind, slopes * scale), strict=True):
        np.testing.assert_array_equal(scaled, wanted)


@each_kind
def test_a_loss_scale_leaves_no_trace(kind: type[Optimizer]) -> None:
    """A power of two changes no digit of the gradient, if it is taken away again."""
    slopes = np.random.default_rng(4).standard_normal((5, 9))
    for scaled, wanted in zip(
        run(kind, slopes * 2.0**16, 2.0**-16), run(kind, slopes), strict=True
    ):
        np.testing.assert_array_equal(scaled, wanted)


@each_kind
def test_the_gradient_is_not_changed(kind: type[Optimizer]) -> None:
    slope = np.random.default_rng(4).standard_normal(9)
    kept = slope.copy()
    for scale in (1.0, 0.3):
        run(kind, slope[None], scale)
    np.testing.assert_array_equal(slope, kept)


# Dtypes


@each_kind
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_updates_are_in_place_and_in_the_dtype_of_the_values(
    kind: type[Optimizer], dtype: Any
) -> None:
    x = np.ones(3, dtype)
    optimizer = kind({"x": x}, lr=0.1)
    optimizer.step({"x": np.ones(3, dtype)})
    assert optimizer.values["x"] is x and (x < 0.95).all()
    assert all(array.dtype == dtype and array.shape == (3,) for array in optimizer.arrays())
    assert len(optimizer.arrays()) == 1 + len(kind.STATES)


@each_kind
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 2.0**-12])
def test_gradients_of_two_bytes_update_in_float32(
    kind: type[Optimizer], dtype: str, scale: float
) -> None:
    """The scale too is applied in float32: in float16 these gradients would be gone."""
    slopes = (np.random.default_rng(4).standard_normal((5, 9)) * 1e-3).astype(dtype_of(dtype))
    assert (slopes * np.array(scale, slopes.dtype) != 0).all() == (
        scale == 1 or dtype == "bfloat16"
    )
    found = run(kind, slopes, scale, np.float32)
    wanted = run(kind, slopes.astype(np.float32), scale, np.float32)
    for array, other in zip(found, wanted, strict=True):
        assert array.dtype == np.float32 and array.any()
        np.testing.assert_array_equal(array, other)


# Names


@each_kind
def test_what_gets_no_gradient_stays_as_it_is(kind: type[Optimizer]) -> None:
    optimizer = kind({"a": np.ones(2), "b": np.ones(2)}, lr=0.1)
    optimizer.step({"a": np.ones(2)})
    np.testing.assert_array_equal(optimizer.values["b"], 1)
    assert not any(state["b"].any() for state in optimizer.states.values())
    assert (optimizer.values["a"] < 0.95).all()


@each_kind
def test_gradients_may_come_one_by_one(kind: type[Optimizer]) -> None:
    """Each is asked for when the one before has been used."""
    seen = []

    def gradients() -> Any:
        for name in ("b", "a"):
            seen.append({key: x[0] for key, x in optimizer.values.items()})
            yield name, np.ones(2)

    optimizer = kind({"a": np.ones(2), "b": np.ones(2)}, lr=0.1)
    optimizer.step(gradients())
    assert seen[0] == {"a": 1, "b": 1} and seen[1]["a"] == 1 and seen[1]["b"] < 0.95
    assert optimizer.steps == 1
    np.testing.assert_array_equal(optimizer.values["a"], optimizer.values["b"])


def test_any_part_can_be_updated_without_the_rest() -> None:
    """What makes the division of an update among ranks exact."""
    slopes = np.random.default_rng(4).standard_normal((5, 20))
    values = np.random.default_rng(5).standard_normal(20)
    whole, parts = values.copy(), values.copy()
    one = AdamW({"x": whole})
    several = AdamW({"x": parts[:7], "y": parts[7:8], "z": parts[8:]})
    for g in slopes:
        one.step({"x": g})
        several.step({"x": g[:7], "y": g[7:8], "z": g[8:]})
    np.testing.assert_array_equal(parts, whole)


def test_states_are_made_by_make_state() -> None:
    made = []

    def make_state(x: Any) -> Any:
        made.append(np.zeros_like(x))
        return made[-1]

    optimizer = Adam({"a": np.ones(2), "b": np.ones(3)}, make_state=make_state)
    optimizer.step({"a": np.ones(2), "b": np.ones(3)})
    states = [state[name] for state in optimizer.states.values() for name in ("a", "b")]
    assert len(made) == 4 and all(mine is its for mine, its in zip(made, states, strict=True))
    assert all(state.all() for state in made)
    assert list(optimizer.states) == ["first", "second"]


def test_an_optimizer_without_values_does_nothing() -> None:
    """A rank that owns nothing of a small unit."""
    optimizer = AdamW({"x": np.ones(0)})
    optimizer.step({"x": np.ones(0)})
    assert optimizer.steps == 1


@each_kind
def test_a_gradient_that_belongs_to_nothing_is_refused(kind: type[Optimizer]) -> None:
    with pytest.raises(ValueError, match="there is a gradient for 'b', which is not a parameter"):
        kind({"a": np.ones(1)}).step({"b": np.ones(1)})


@each_kind
@pytest.mark.parametrize("shape", [(2,), (4,), (3, 1), ()])
def test_a_gradient_of_another_shape_is_refused(kind: type[Optimizer], shape: tuple[int]) -> None:
    x = np.ones(3)
    with pytest.raises(
        ValueError, match=r"the gradient of 'a' has shape \(.*\), its values \(3,\)"
    ):
        kind({"a": x}).step({"a": np.ones(shape)})
    np.testing.assert_array_equal(x, 1)
