"""Layers with the same input, whose outputs are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parallel.nn import Activations, Array, ArraySpec, Layer, LayerTraffic, Sequential, Step


class SumOfLayers(Sequential):
    """Named layers with the same input, whose outputs are added.

    The sum of an MLP and a mixture of experts has a shared expert (DeepSeek-AI 2024); Rajbhandari
    et al. 2022 call it a residual mixture of experts (PR-MoE).
    """

    def contain(self, layers: Mapping[str, Layer]) -> None:
        super().contain(layers)
        self.saves_input = any(layer.saves_input for layer in self.layers.values())

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        pairs = [layer.forward(x, step) for layer in self.layers.values()]
        total = pairs[0][0]
        for y, _ in pairs[1:]:
            total = total + y
        return total, [saved for _, saved in pairs]

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        layers = zip(self.layers.values(), saved, strict=True)
        pairs = [layer.backward_input(dy, saved_by_layer) for layer, saved_by_layer in layers]
        return sum(dx for dx, _ in pairs), [rest for _, rest in pairs]

    def backward_weight(self, rest: Any) -> None:
        for layer, rest_of_layer in zip(self.layers.values(), rest, strict=True):
            layer.backward_weight(rest_of_layer)

    def backward(self, dy: Array, saved: Any) -> Array:
        layers = zip(self.layers.values(), saved, strict=True)
        return sum(layer.backward(dy, saved_by_layer) for layer, saved_by_layer in layers)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        """Return what the layers keep; what several of them keep counts once."""
        kept = [layer.activation_bytes(x) for layer in self.layers.values()]
        out, keep_input = kept[0].out, [of_layer.is_input_in_rest for of_layer in kept]
        keep_dy = [of_layer.is_dy_in_rest for of_layer in kept]
        again = repeated(x, [layer.saves_input for layer in self.layers.values()])
        return Activations(
            sum(of_layer.saved for of_layer in kept) - again,
            out,
            sum(of_layer.rest for of_layer in kept)
            - repeated(x, keep_input)
            - repeated(out, keep_dy),
            max(of_layer.extra for of_layer in kept),
            is_input_in_rest=any(keep_input),
            is_dy_in_rest=any(keep_dy),
        )

    def out(self, x: ArraySpec) -> ArraySpec:
        return next(iter(self.layers.values())).out(x)

    def check_input(self, x: ArraySpec) -> None:
        for layer in self.layers.values():
            layer.check_input(x)

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        traffic = [layer.traffic(x) for layer in self.layers.values()]
        return LayerTraffic(
            tuple(call for of_layer in traffic for call in of_layer.forward),
            tuple(call for of_layer in traffic for call in of_layer.backward),
        )


def repeated(x: ArraySpec, is_kept: Sequence[bool]) -> int:
    """Return the bytes of an array `x` in excess of one, if so many layers keep it."""
    return x.nbytes * max(0, sum(is_kept) - 1)
