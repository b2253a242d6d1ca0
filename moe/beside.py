"""Layers side by side, whose outputs are added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel.nn import Activations, Array, ArraySpec, Layer, LayerTraffic, Sequential, Step


class Beside(Sequential):
    """Named layers with the same input, whose outputs are added.

    An MLP beside a mixture of experts is a shared expert (DeepSeek-AI 2024), or what Rajbhandari et
    al. 2022 call a residual mixture of experts (PR-MoE).
    """

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        super().__init__(layers)
        self.saves_input = any(layer.saves_input for layer in self.layers.values())

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        found = [layer.forward(x, step) for layer in self.layers.values()]
        total = found[0][0]
        for y, _ in found[1:]:
            total = total + y
        return total, [saved for _, saved in found]

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        found = [
            layer.backward_input(dy, each)
            for layer, each in zip(self.layers.values(), saved, strict=True)
        ]
        return sum(dx for dx, _ in found), [rest for _, rest in found]

    def backward_weight(self, rest: Any) -> None:
        for layer, each in zip(self.layers.values(), rest, strict=True):
            layer.backward_weight(each)

    def backward(self, dy: Array, saved: Any) -> Array:
        pairs = zip(self.layers.values(), saved, strict=True)
        return sum(layer.backward(dy, each) for layer, each in pairs)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        layers = list(self.layers.values())
        each = [layer.activation_bytes(x) for layer in layers]
        # Those that save it keep it until the second half of backward.
        twice = x.nbytes * max(0, sum(layer.saves_input for layer in layers) - 1)
        saved, outputs, rest, extra, _ = zip(*each, strict=True)
        return Activations(sum(saved) - twice, outputs[0], sum(rest) - twice, max(extra))

    def out(self, x: ArraySpec) -> ArraySpec:
        return next(iter(self.layers.values())).out(x)

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        each = [layer.traffic(x) for layer in self.layers.values()]
        forward = [call for calls in each for call in calls.forward]
        backward = [call for calls in each for call in calls.backward]
        return LayerTraffic(tuple(forward), tuple(backward))
