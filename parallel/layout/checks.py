"""Refuse combinations that cannot train, before anything is sent."""

from __future__ import annotations

import collectives
from parallel.layout.recipe import Recipe
from parallel.mesh import ROW_AXES, Mesh
from parallel.nn import ArraySpec, Model
from parallel.optim import Storage
from parallel.pipeline import Schedule
from parallel.sharding import AllReduce, ReduceScatter, Sharding

EXACT = (AllReduce, ReduceScatter)  # these sum in the dtype of the recipe


def check_model(model: Model, mesh: Mesh, sharding: Sharding) -> None:
    """Raise ValueError unless a model made for this mesh and a sharding can train together.

    The model or the sharding must use each axis of the mesh.  Both may use only ``"expert"``, along
    which ranks compute different rows, exchange their tokens, and divide experts by their
    placement.
    """
    if model.mesh.size > 1 and model.mesh is not mesh:
        raise ValueError("the model was made for another mesh: pass the same to both")
    if model.needs_rows and model.mesh is not mesh and mesh.size > 1:
        raise ValueError(
            "a layer of the model depends on the rows of all ranks: make the model with mesh="
        )
    wanted = {axis for spec in model.specs.values() for axis in spec.split_axes}
    both = [axis for axis in sharding.axes if axis in wanted]
    if wrong := [axis for axis in both if axis != "expert"]:
        raise ValueError(f"both the model and the sharding divide along {wrong[0]!r}")
    is_simple = not sharding.secondary_axes and sharding.every is None and sharding.server is None
    if both and not is_simple:
        raise ValueError(
            "ZeRO++, local updates and a server need whole units: the model divides some along"
            f" {both[0]!r}, which is an axis of the sharding"
        )
    if model.context is not None:  # a row may have fewer positions, of which experts take fewer
        model.check_input(ArraySpec.tokens(0, model.context, 1, rank=mesh.rank))
    if mesh.axes.get("context", 1) > 1 and "context" not in sharding.axes:
        raise ValueError(
            "ranks along 'context' compute different tokens: the sharding must sum over it, such as"
            f" {summing(mesh)}"
        )
    if sharding.every is not None and model.needs_rows:
        raise ValueError("local updates take no layer that depends on the rows of the whole batch")
    partial = {axis for spec in model.specs.values() for axis in spec.partial}
    used = {"pipe"} | wanted | partial if model.mesh.size > 1 else set()
    used |= set(sharding.axes)
    if rest := [axis for axis, n in mesh.axes.items() if n > 1 and axis not in used]:
        also = ", or make the model with mesh=" if rest[0] in ("pipe", "tensor") else ""
        also = f", or pass sharding={summing(mesh)}" if rest[0] in ROW_AXES else also
        raise ValueError(
            f"neither the model nor the sharding uses the axis {rest[0]!r}: leave it out{also}"
        )


def summing(mesh: Mesh) -> str:
    """Return a sharding, in words, that sums over all axes along which tokens may differ."""
    axes = tuple(axis for axis in mesh.axes if axis in ROW_AXES)
    return f"Sharding.zero(1, axes={axes})"


def check_recipe(recipe: Recipe, sharding: Sharding) -> None:
    """Raise ValueError if the sharding cannot train by this recipe."""
    if recipe.reduce_dtype is not None and not isinstance(sharding.reduction, EXACT):
        name = type(sharding.reduction).__name__
        raise ValueError(f"reduce_dtype is {recipe.reduce_dtype}, but {name} has its own")
    is_simple = recipe.offload is Storage and recipe.dtype != "float16"
    if sharding.every is not None and not is_simple:
        raise ValueError(
            "local updates take no offload, and no float16, in which ranks may skip different"
            " updates"
        )


def check_arguments(axes: dict[str, int], sharding: Sharding, algorithm: str) -> None:
    """Raise ValueError unless a mesh of these `axes` can use this sharding and algorithm.

    The algorithm must give all ranks the same bits.
    """
    if missing := [axis for axis in sharding.axes if axis not in axes]:
        has = ", ".join(axes)
        raise ValueError(f"the sharding needs an axis {missing[0]!r}; the mesh has {has}")
    for collective, sizes in sharding.algorithm_sizes(axes).items():
        for size in sizes:
            if not collectives.choose(collective, algorithm, size, 0).algorithm.is_bitwise:
                raise ValueError(
                    f"{collective}.{algorithm} rounds differently on different ranks: their"
                    " parameters would differ; choose another algorithm"
                )


def check_schedule(
    schedule: Schedule, mesh: Mesh, recipe: Recipe, sharding: Sharding, model: Model
) -> None:
    """Raise ValueError unless a model can train by this schedule, recipe and sharding on a mesh."""
    num_ranks, num_parts = mesh.axes.get("pipe", 1), recipe.num_micro_batches
    if (schedule.num_ranks, schedule.num_micro_batches) != (num_ranks, num_parts):
        raise ValueError(
            f"the schedule is for {schedule.num_ranks} ranks and {schedule.num_micro_batches}"
            f" micro-batches: the mesh has {num_ranks} along 'pipe', and the recipe {num_parts}"
        )
    if num_ranks > 1 and (sharding.secondary_axes or sharding.every is not None):
        raise ValueError("ZeRO++ and local updates do not work with a pipeline")
    if schedule.is_asynchronous:
        check_asynchronous(recipe, sharding, model)


def check_asynchronous(recipe: Recipe, sharding: Sharding, model: Model) -> None:
    """Raise ValueError for what needs the gradient of all stages at once, or parts of units."""
    is_simple = not sharding.divided and not sharding.find_unused_parameters
    reasons = {
        "clip": recipe.clip is not None,
        "float16": recipe.dtype == "float16",
        "sharding of parameters or states": not is_simple or sharding.every is not None,
        "offload": recipe.offload is not Storage,
        "biases of experts, which change once in a step": model.num_counts > 0,
    }
    if given := [reason for reason, is_given in reasons.items() if is_given]:
        raise ValueError(f"pipedream updates each stage alone: it takes no {given[0]}")
