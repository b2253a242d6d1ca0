"""A training step of a model with experts, on ranks that need not exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe.layers import MixtureOfExperts, mixtures
from moe.models import moe_gpt
from moe.routing import RoutingLog
from parallel import Layout, Mesh, Model, PredictedCall, Recipe, Sharding
from parallel.mesh import ROW_AXES
from parallel.predict import RunSize, step_traffic


@dataclass(frozen=True)
class TrainingStep:
    """A model with experts, the batch of a step, and how its tokens are routed.

    Attributes
    ----------
    model : mapping
        The options of `moe.moe_gpt`, ``context`` among them, but not ``mesh`` and ``log``.
    rows : int
        The rows of the batch of all ranks.
    num_micro_batches : int
        The parts in which each rank computes its rows.
    dtype : str
        The dtype of vectors and gradients.
    log : RoutingLog
        The routing of the whole batch by each layer.
    number : int
        The number of the step in the log.

    Raises
    ------
    ValueError
        If the model has no experts, or if the log has no routing of them in this step, or one of
        another number of experts, tokens, groups or choices, or of another capacity.

    Attributes
    ----------
    layers : tuple of MixtureOfExperts
        The layers with experts of the model on one rank.
    """

    model: Mapping[str, Any]
    rows: int
    log: RoutingLog
    number: int = 0
    num_micro_batches: int = 1
    dtype: str = "float64"
    layers: tuple[MixtureOfExperts, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        layers = tuple(mixtures(moe_gpt(**on_one_rank(self.model))))
        object.__setattr__(self, "layers", layers)
        if not layers:
            raise ValueError("the model has no experts: it has fewer blocks than `every`")
        for layer in layers:
            self._check(layer)

    def _check(self, layer: MixtureOfExperts) -> None:
        """Raise ValueError unless the log has a routing that the `layer` may have made."""
        known = sorted({name for number, name in self.log.parts if number == self.number})
        if layer.name not in known:
            raise ValueError(
                f"the log has no routing of {layer.name} in step {self.number}, only of"
                f" {', '.join(known) or 'other steps'}"
            )
        routing, context = self.log.whole(self.number, layer.name), self.model["context"]
        tokens = self.rows * context
        groups = layer.options.num_groups(self.rows)
        gate, size = layer.gate, tokens // groups
        for what, wanted, actual in (
            ("experts", gate.num_experts, routing.num_experts),
            ("tokens", tokens, routing.num_tokens),
            ("groups", groups, routing.num_groups),
            ("choices", groups * gate.num_entries(size), len(routing.token)),
            ("as capacity", gate.capacity(size), routing.capacity),
        ):
            if wanted != actual:
                raise ValueError(
                    f"{layer.name} has {wanted} {what}, but the routing in the log has {actual}"
                )


def on_one_rank(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a `model` for one rank, whose routing is the same: it sends nothing."""
    return {**model, "dispatch": "flat"}


def predict_calls(
    step: TrainingStep, axes: Mapping[str, int], **options: Any
) -> list[PredictedCall]:
    """Return what one training step sends, on a mesh with these `axes`.

    The `options` are as in `layout_of`, which says what is raised.
    """
    layout = layout_of(step, axes, **options)
    return step_traffic(layout, RunSize(1, 1, (step.rows, step.model["context"]), step.number))


def layout_of(
    step: TrainingStep,
    axes: Mapping[str, int],
    *,
    layer: str | None = None,
    algorithm: str = "ring",
    **changes: Any,
) -> Layout:
    """Return the layout of a step on ranks that need not exist.

    Parameters
    ----------
    step : TrainingStep
    axes : mapping
        The number of ranks along each axis, slowest first, as in `parallel.Mesh`.
    layer : str, optional
        The name of the only layer that is trained, such as ``"block1"``; by default the whole
        model.
    algorithm : str
        The algorithm of the sums of gradients, as in `parallel.Trainer`.
    changes
        Options of `moe.moe_gpt` in place of the options of the step.

    Raises
    ------
    ValueError
        If the step cannot be trained on such a mesh, or if there is no such layer.
    """
    axes = dict(axes) if "data" in axes else {"data": 1, **axes}
    mesh = Mesh(None, **axes)
    model = moe_gpt(**{**step.model, **changes}, mesh=mesh)
    layers = {mixture.name: mixture for mixture in mixtures(model)}
    for mixture in layers.values():
        mixture.expected = step.log
    if layer is not None:
        if layer not in layers:
            raise ValueError(f"no experts are in {layer!r}: choose from {', '.join(layers)}")
        model = Model({layer: layers[layer]}, mesh=mesh)
    recipe = Recipe(dtype=step.dtype, num_micro_batches=step.num_micro_batches)
    sharding = Sharding.ddp(axes=tuple(axis for axis in ROW_AXES if axis in axes))
    layout = Layout(mesh, model, recipe, sharding=sharding, algorithm=algorithm)
    _check_rows(step, mesh, sharding)
    layout.check_batch(step.rows, step.model["context"])
    return layout


def _check_rows(step: TrainingStep, mesh: Mesh, sharding: Sharding) -> None:
    """Raise ValueError if a micro-batch of a rank would have no rows."""
    num_ranks = mesh.size_of(sharding.row_axes)
    if step.rows < num_ranks * step.num_micro_batches:
        raise ValueError(
            f"a batch of {step.rows} rows cannot be divided among {num_ranks} ranks with"
            f" {step.num_micro_batches} micro-batches each"
        )
