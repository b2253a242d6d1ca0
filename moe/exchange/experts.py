"""The experts of a rank: copies of one layer, each with its own part of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from moe.exchange.buffers import Received, Rows
from moe.exchange.parts import Part
from parallel import Mesh
from parallel.nn import Array, Layer, ParameterSpec, Step

Half: TypeAlias = Callable[[Layer, Array, Any], tuple[Array, Any]]
"""Called with an expert, dy and what forward saved; returns dx and what the other half needs."""


class Experts:
    """The experts of `num_experts` that are `owned` by this rank.

    `make` makes one: a layer that turns rows (n, dim) into rows (n, dim).  Ranks along `axis` of
    the mesh divide the experts.
    """

    def __init__(
        self, make: Callable[[], Layer], num_experts: int, owned: slice, axis: str
    ) -> None:
        self.make, self.num_experts, self.axis = make, num_experts, axis
        self.first, self.pattern = owned.start, make()
        self.layers = [make() for _ in range(owned.start, owned.stop)]
        self.value: dict[str, Array] = {}
        self.gradient: dict[str, Array] = {}

    def whole(self) -> Experts:
        """Return all experts, with no parameters yet."""
        return Experts(self.make, self.num_experts, slice(0, self.num_experts), self.axis)

    @property
    def needs_rows(self) -> bool:
        """Whether experts depend on which tokens of the batch they compute."""
        return self.pattern.needs_rows

    def specs(self) -> dict[str, ParameterSpec]:
        """Return the parameters of all experts, with a first dimension for the experts."""
        specs = {}
        for name, spec in self.pattern.specs().items():
            inner = tuple((dim + 1, *where) for dim, *where in spec.splits)
            specs[name] = replace(
                spec, shape=(self.num_experts, *spec.shape), splits=((0, self.axis), *inner)
            )
        return specs

    def sizes(self, mesh: Mesh, rank: int) -> list[int]:
        """Return the elements of each parameter of one expert on a `rank` of a `mesh`."""
        return [math.prod(spec.box(mesh, rank).shape) for spec in self.pattern.specs().values()]

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        """Let each expert work on its part of the parameters and gradients."""
        self.value, self.gradient = values, gradients
        for i, expert in enumerate(self.layers):
            value = {name: x[i] for name, x in values.items()}
            expert.bind(value, {name: x[i] for name, x in gradients.items()})

    def forward(self, rows: Received, out: Rows, part: Part, step: Step) -> list[Any]:
        """Set `out` to what the experts make of the received `rows`; return what experts keep."""
        kept = []
        for i, expert in enumerate(self.layers):
            with step.numbered(self._numbers(i, part, step)):
                y, saved = expert.forward(rows.of_expert(part, i), step)
            out.set_of_expert(part, i, y)
            kept.append(saved)
        return kept

    def _numbers(self, i: int, part: Part, step: Step) -> Array:
        """Return numbers of the rows of expert `i` of this rank, different for each expert."""
        if step.numbers is None:
            return None
        return step.numbers.of_expert(part, i) * self.num_experts + self.first + i

    def backward(
        self, drows: Received, out: Rows, part: Part, kept: list[Any], half: Half
    ) -> list[Any]:
        """Set `out` to the derivatives by the received rows; return what weights need.

        `drows` are the derivatives by what `forward` has set, and `kept` is what it returned.
        """
        rests = []
        for i, (expert, saved) in enumerate(zip(self.layers, kept, strict=True)):
            dx, rest = half(expert, drows.of_expert(part, i), saved)
            out.set_of_expert(part, i, dx)
            rests.append(rest)
        return rests

    def backward_weight(self, rests: Sequence[list[Any]]) -> None:
        """Add the derivatives by the parameters; `rests` are what `backward` returned, by part."""
        for rests_of_part in rests:
            for expert, rest in zip(self.layers, rests_of_part, strict=True):
                expert.backward_weight(rest)


def first_half(expert: Layer, dy: Array, saved: Any) -> tuple[Array, Any]:
    """Do the first half of backward."""
    return expert.backward_input(dy, saved)


def both_halves(expert: Layer, dy: Array, saved: Any) -> tuple[Array, Any]:
    """Do both halves of backward: nothing is kept between them."""
    return expert.backward(dy, saved), None
