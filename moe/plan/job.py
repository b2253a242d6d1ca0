"""A training step of a model with experts on ranks that do not exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe.gpt import moe_gpt
from moe.layer import MixtureOfExperts, mixtures
from moe.log import RoutingLog
from parallel import Mesh, Model, PredictedCall, Recipe, Sharding
from parallel.mesh import ROW_AXES
from parallel.plan.ranks import PlannedMesh, PlannedTrainer
from parallel.runtime.prediction import RunSize


@dataclass(frozen=True)
class Job:
    """A model with experts, the batch of a step, and how its tokens are routed.

    Attributes
    ----------
    model : mapping
        The options of `moe.moe_gpt`, ``context`` among them, but not ``mesh`` and ``log``.
    rows : int
        Of the batch of all ranks.
    num_micro_batches : int
        The parts in which each rank computes its rows.
    dtype : str
        Of vectors and gradients.
    log : RoutingLog
        The routing of the whole batch by each layer.
    step : int
        Which step of the log it is.

    Raises
    ------
    ValueError
        If the model has no experts, or if the log has no routing of them in this step, or one of
        another number of experts, tokens, groups or choices, or of another capacity.

    Attributes
    ----------
    layers : tuple of MixtureOfExperts
        Those of the model on one rank.
    """

    model: Mapping[str, Any]
    rows: int
    log: RoutingLog
    step: int = 0
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
        known = sorted({name for step, name in self.log.parts if step == self.step})
        if layer.name not in known:
            raise ValueError(
                f"the log has no routing of {layer.name} in step {self.step}, only of"
                f" {', '.join(known) or 'other steps'}"
            )
        routing, context = self.log.whole(self.step, layer.name), self.model["context"]
        tokens = self.rows * context
        groups = layer.options.num_groups(self.rows)
        gate, size = layer.gate, tokens // groups
        for what, wanted, found in (
            ("experts", gate.num_experts, routing.num_experts),
            ("tokens", tokens, routing.num_tokens),
            ("groups", groups, routing.num_groups),
            ("choices", groups * gate.num_entries(size), len(routing.token)),
            ("as capacity", gate.capacity(size), routing.capacity),
        ):
            if wanted != found:
                raise ValueError(
                    f"{layer.name} has {wanted} {what}, but the routing in the log has {found}"
                )


def on_one_rank(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a `model` for one rank, whose routing is the same: it sends nothing."""
    return {**model, "dispatch": "flat"}


def trainer_of(
    job: Job,
    axes: Mapping[str, int],
    *,
    layer: str | None = None,
    algorithm: str = "ring",
    **changes: Any,
) -> PlannedTrainer:
    """Return the run of a job on ranks that do not exist; for the arguments, see `predicted`."""
    axes = dict(axes) if "data" in axes else {"data": 1, **axes}
    mesh = PlannedMesh(**axes)
    model = moe_gpt(**{**job.model, **changes}, mesh=mesh)
    found = {each.name: each for each in mixtures(model)}
    for each in found.values():
        each.expected = job.log
    if layer is not None:
        if layer not in found:
            raise ValueError(f"no experts are in {layer!r}: choose from {', '.join(found)}")
        model = Model({layer: found[layer]}, mesh=mesh)
    recipe = Recipe(dtype=job.dtype, num_micro_batches=job.num_micro_batches)
    sharding = Sharding.ddp(axes=tuple(axis for axis in ROW_AXES if axis in axes))
    trainer = PlannedTrainer(mesh, model, recipe, sharding=sharding, algorithm=algorithm)
    _check_rows(job, mesh, sharding)
    trainer.check_batch(job.rows, job.model["context"])
    return trainer


def predicted(
    job: Job,
    axes: Mapping[str, int],
    *,
    layer: str | None = None,
    algorithm: str = "ring",
    **changes: Any,
) -> list[PredictedCall]:
    """Return what one training step sends, on a mesh with these axes.

    Parameters
    ----------
    job : Job
    axes : mapping
        The number of ranks along each axis, slowest first, as in `parallel.Mesh`.
    layer : str, optional
        The name of the only layer that is trained, such as ``"block1"``; by default the whole
        model.
    algorithm : str
        That of the sums of gradients, as in `parallel.Trainer`.
    changes
        Options of `moe.moe_gpt` in place of those of the job.

    Raises
    ------
    ValueError
        If the job cannot be trained on such a mesh, or if there is no such layer.
    """
    trainer = trainer_of(job, axes, layer=layer, algorithm=algorithm, **changes)
    shape = job.rows, job.model["context"]
    return trainer.step_traffic(RunSize(1, 1, shape, job.step))


def _check_rows(job: Job, mesh: Mesh, sharding: Sharding) -> None:
    """Raise ValueError if a micro-batch of a rank would have no rows."""
    num_ranks = mesh.size_of(sharding.row_axes)
    if job.rows < num_ranks * job.num_micro_batches:
        raise ValueError(
            f"a batch of {job.rows} rows cannot be divided among {num_ranks} ranks with"
            f" {job.num_micro_batches} micro-batches each"
        )
