"""Layers that keep only their input, and run forward again during backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from parallel.nn.functional import Array
from parallel.nn.layer.layer import Layer
from parallel.nn.layer.sequential import Sequential
from parallel.nn.layer.specs import Activations, ArraySpec, LayerTraffic, ParameterSpec
from parallel.nn.layer.step import Step


class Recompute(Layer):
    """A layer that keeps only its input, and runs forward again during backward.

    Chen et al. 2016.  Korthikanti et al. 2022 recompute attention alone (selective recomputation).

    Parameters
    ----------
    layer : Layer
        The layer that computes.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer, self.needs_rows = layer, layer.needs_rows

    def specs(self) -> dict[str, ParameterSpec]:
        return self.layer.specs()

    def parts(self, name: str = "") -> Iterator[tuple[str, Layer]]:
        yield name, self
        yield from self.layer.parts(name)

    def config(self) -> list[Any]:
        return self.layer.config()  # the results are the same: ranks that send nothing may differ

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        self.layer.bind(values, gradients)

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        return self.layer.forward(x, step)[0], (x, step)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self.layer.backward_input(dy, self._again(*saved))

    def backward_weight(self, rest: Any) -> None:
        self.layer.backward_weight(rest)

    def backward(self, dy: Array, saved: Any) -> Array:
        return self.layer.backward(dy, self._again(*saved))

    def _again(self, x: Array, step: Step) -> Any:
        """Return what forward saves for `x`, computed again."""
        losses, step.losses, step.is_again = step.losses, [], True
        saved = self.layer.forward(x, step)[1]
        step.losses, step.is_again = losses, False
        step.num_recomputed += 1
        step.track(saved)
        return saved

    def activation_bytes(self, x: ArraySpec) -> Activations:
        inner = self.layer.activation_bytes(x)
        extra = inner.saved + inner.extra - x.nbytes * self.layer.saves_input
        return inner._replace(saved=x.nbytes, extra=extra, is_out_saved=False)

    def out(self, x: ArraySpec) -> ArraySpec:
        return self.layer.out(x)

    def check_input(self, x: ArraySpec) -> None:
        self.layer.check_input(x)

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        forward, backward = self.layer.traffic(x)
        return LayerTraffic(forward, forward + backward)


def recomputed(layers: Mapping[str, Layer], patterns: Sequence[str]) -> dict[str, Layer]:
    """Return `layers` with `Recompute` around every layer whose name matches one of the `patterns`.

    Raises
    ------
    ValueError
        If a pattern matches no layer.
    """
    unused = dict.fromkeys(patterns)

    def changed(name: str, layer: Layer) -> Layer:
        parts = name.count(".")
        matching = {p for p in patterns if p.count(".") == parts and fnmatchcase(name, p)}
        for pattern in matching:
            unused.pop(pattern, None)
        if matching:
            return Recompute(layer)
        if patterns and isinstance(layer, Sequential):
            inner = {key: changed(f"{name}.{key}", part) for key, part in layer.layers.items()}
            return layer.with_layers(inner)
        return layer

    made = {name: changed(name, layer) for name, layer in layers.items()}
    if unused:
        raise ValueError(f"there is no layer {next(iter(unused))!r} to recompute")
    return made
