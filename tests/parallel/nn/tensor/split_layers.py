"""Layers that ranks divide, beside the same layers on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import collectives
from collectives import Communicator
from parallel import MemoryTracker, Mesh, PredictedCall, TrafficTable
from parallel.nn import Activations, ArraySpec, Layer, LayerTraffic, Model, Step
from parallel.nn.tensor import Divided, Whole
from parallel.optim import dtype_of
from tests.parallel.nn.bound_models import Bound, Values

Region: TypeAlias = Whole | None
Cut: TypeAlias = Callable[[Any, Whole, int], Any]  # what a rank has of a whole array
FORMS: dict[str, Callable[[Mesh], Whole]] = {
    "whole": Whole,
    "keep": Divided,
    "gather": lambda mesh: Divided(mesh, gathers_again=True),
}
CLASSES = 7
CLOSE = {"float64": 1e-12, "float32": 1e-5, "float16": 4 * 2.0**-10, "bfloat16": 4 * 2.0**-7}


def whole(x: Any, region: Whole, rank: int) -> Any:
    return x


def tokens(x: Any, region: Whole, rank: int) -> Any:
    """What a rank has outside of the regions."""
    if not isinstance(region, Divided):
        return x
    return x[:, region.part(x.shape[1], rank)].copy()


def features(*shape: int, dim: int = 0) -> Cut:
    """Of features of this shape, a rank has a part of a dimension."""

    def cut(x: Any, region: Whole, rank: int) -> Any:
        lead = x.shape[:-1]
        index = (*[slice(None)] * (len(lead) + dim), region.part(shape[dim], rank))
        part = x.reshape(*lead, *shape)[index]
        return part.reshape(*lead, int(np.prod(part.shape[len(lead) :]))).copy()

    return cut


class Case(NamedTuple):
    """A layer, made for a region or for one rank; an input; and what a rank has of both ends."""

    make: Callable[[Region], Layer]
    shape: tuple[int, ...]
    into: Cut = tokens
    out: Cut = tokens
    num_tokens: int = 0  # of the vocabulary, if the input are tokens

    def input(self, dtype: str) -> Values:
        rng = np.random.default_rng(4)
        if self.num_tokens:
            return rng.integers(0, self.num_tokens, self.shape)
        return rng.standard_normal(self.shape).astype(dtype_of(dtype))

    def step(self) -> Step:
        rows, length = self.shape[:2]
        targets = np.random.default_rng(3).integers(0, CLASSES, (rows, length))
        return Step(targets, total=rows * length)

    def specs(self, x: Any, region: Whole, dtype: str) -> list[ArraySpec]:
        """The inputs of all ranks, before they exist."""
        width, length = dtype_of(dtype).itemsize, self.shape[1]
        options: dict[str, Any] = {"context": length, "length": length}
        options["are_tokens"] = self.num_tokens > 0
        return [
            ArraySpec(self.into(x, region, rank).shape, width, rank=rank, **options)
            for rank in range(region.mesh.size)
        ]


class Found(NamedTuple):
    """What a rank has computed and counted; `formulas` and `calls` are those of all ranks."""

    y: Any
    dx: Any
    gradients: dict[str, Values]
    made: Bound
    saved: int
    rest: int
    formulas: Sequence[Activations]
    calls: Sequence[LayerTraffic]
    table: TrafficTable | None


def bound_by_name(model: Model, dtype: str = "float64", seed: int = 7) -> Bound:
    """With random values everywhere, which depend on the names of whole parameters alone."""
    values = {u: np.zeros(n, dtype_of(dtype)) for u, n in model.unit_sizes.items()}
    gradients = {unit: np.zeros_like(x) for unit, x in values.items()}
    for name, view in model.named(values).items():
        spec, rng = model.specs[name], np.random.default_rng([seed, *name.encode()])
        drawn = spec.draw(seed, name) + 0.3 * rng.standard_normal(spec.shape)
        view[...] = drawn[spec.box(model.mesh).slices]
    for layer in model.layers:
        model.bind(layer, values, gradients)
    return Bound(model, values, gradients)


def slope_of(y: Any) -> Any:
    """Some derivative by the output: of a loss it is 1."""
    if isinstance(y, float):
        return 1.0
    return np.random.default_rng(2).standard_normal(y.shape).astype(y.dtype)


def alone(case: Case, dtype: str = "float64") -> tuple[Any, Any, dict[str, Values]]:
    """Output, derivative by the input, and gradients, on one rank."""
    made = bound_by_name(Model({"only": case.make(None)}), dtype)
    layer = made.model.layers["only"]
    y, saved = layer.forward(case.input(dtype), case.step())
    return y, layer.backward(slope_of(y), saved), made.named_gradients()


def on_ranks(case: Case, size: int, form: str, dtype: str = "float64") -> list[Found]:
    """The same on ranks along "tensor", with all that they keep and send."""
    dy = slope_of(alone(case, dtype)[0])

    def fn(comm: Communicator) -> Found:
        mesh = Mesh(comm, tensor=size)
        region, x = FORMS[form](mesh), case.input(dtype)
        mesh["tensor"]  # now, so that only calls of layers are recorded
        made = bound_by_name(Model({"only": case.make(region)}, mesh=mesh), dtype)
        layer, specs = made.model.layers["only"], case.specs(x, region, dtype)
        with comm.record() as ledger:
            with collectives.phase("forward"):
                y, saved = layer.forward(case.into(x, region, mesh.rank), case.step())
            memory = MemoryTracker()
            memory.track("saved", saved)
            slope = dy if isinstance(dy, float) else case.out(dy, region, mesh.rank)
            with collectives.phase("backward"):
                dx = layer.backward(slope, saved)
        gradients = {name: x.copy() for name, x in made.named_gradients().items()}
        rest = check_halves(made, layer, slope, saved, dx)
        calls = [layer.traffic(each) for each in specs]
        record = ledger.gather()
        table = None
        if record is not None:
            table = TrafficTable(predicted(calls[0], size), record, None, size=size)
        formulas = [layer.activation_bytes(each) for each in specs]
        return Found(y, dx, gradients, made, memory.now["saved"], rest, formulas, calls, table)

    found: list[Found] = collectives.run(fn, size=size)
    return found


def check_halves(made: Bound, layer: Layer, dy: Any, saved: Any, dx: Any) -> int:
    """The halves of backward do what the whole did, to the bit; the bytes between them."""
    once = {unit: x.copy() for unit, x in made.gradients.items()}
    for x in made.gradients.values():
        x[...] = 0
    again, rest = layer.backward_input(dy, saved)
    assert not any(x.any() for x in made.gradients.values())
    memory = MemoryTracker()
    memory.track("rest", rest)
    layer.backward_weight(rest)
    np.testing.assert_array_equal(again, dx)
    for unit, x in made.gradients.items():
        np.testing.assert_array_equal(x, once[unit])
    return memory.now["rest"]


def predicted(traffic: LayerTraffic, size: int) -> list[PredictedCall]:
    """What one group of all ranks sends in two phases."""
    groups = (tuple(range(size)),)
    return [
        replace(call, phase=phase, groups=groups)
        for phase, calls in zip(("forward", "backward"), traffic, strict=True)
        for call in calls
    ]


def check_values(case: Case, found: Sequence[Found], form: str, dtype: str = "float64") -> None:
    """Outputs and derivatives of all ranks are those of one rank."""
    y, dx, gradients = alone(case, dtype)
    sums: dict[str, Any] = {}
    for rank, each in enumerate(found):
        region = FORMS[form](each.made.model.mesh)
        near(each.y, y if isinstance(y, float) else case.out(y, region, rank), dtype, "y")
        if dx is None:
            assert each.dx is None
        else:
            near(each.dx, case.into(dx, region, rank), dtype, "dx")
        for name, x in each.gradients.items():
            spec = each.made.model.specs[name]
            if spec.partial:
                sums[name] = sums.get(name, 0) + x
            else:
                near(x, gradients[name][spec.box(each.made.model.mesh).slices], dtype, name)
    for name, x in sums.items():
        near(x, gradients[name], dtype, name)


def near(x: Any, wanted: Any, dtype: str, name: str) -> None:
    """Within 1e-12 in float64, 1e-5 in float32, and 4 steps in two bytes, of values near 1."""
    x, wanted = np.asarray(x, np.float64), np.asarray(wanted, np.float64)
    largest = np.abs(wanted).max() if wanted.size else 1.0
    assert x.shape == wanted.shape, name
    np.testing.assert_allclose(x, wanted, rtol=0, atol=CLOSE[dtype] * largest, err_msg=name)


def check_accounts(found: Sequence[Found]) -> None:
    """What each rank counts is what the formulas of all ranks say, and so is what is sent."""
    for each in found:
        for rank, other in enumerate(found):
            formula = each.formulas[rank]
            assert (formula.saved, formula.rest) == (other.saved, other.rest)
            assert formula.out.shape == np.shape(other.y)
            assert each.calls[rank] == found[0].calls[0]
    assert found[0].table is not None
    if len(found) > 1:
        found[0].table.check()
