"""Layers side by side, whose outputs are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        """Return what the layers keep; what several of them keep counts once."""
        each = [layer.activation_bytes(x) for layer in self.layers.values()]
        keep_input = [made.is_input_in_rest for made in each]
        keep_dy = [made.is_dy_in_rest for made in each]
        out = each[0].out
        return Activations(
            sum(made.saved for made in each)
            - repeated(x, [layer.saves_input for layer in self.layers.values()]),
            out,
            sum(made.rest for made in each) - repeated(x, keep_input) - repeated(out, keep_dy),
            max(made.extra for made in each),
            is_input_in_rest=any(keep_input),
            is_dy_in_rest=any(keep_dy),
        )

    def out(self, x: ArraySpec) -> ArraySpec:
        return next(iter(self.layers.values())).out(x)

    def check_input(self, x: ArraySpec) -> None:
        for layer in self.layers.values():
            layer.check_input(x)

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        each = [layer.traffic(x) for layer in self.layers.values()]
        forward = [call for calls in each for call in calls.forward]
        backward = [call for calls in each for call in calls.backward]
        return LayerTraffic(tuple(forward), tuple(backward))


def repeated(x: ArraySpec, is_kept: Sequence[bool]) -> int:
    """Return the bytes of an array `x` in excess of one, if so many layers keep it."""
    return x.nbytes * max(0, sum(is_kept) - 1)
