"""Strategies, optimizers and hooks by name, and how to make them from command-line options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from collectives import Communicator
from parallel.layout import Layout, Recipe
from parallel.mesh import AXES, ROW_AXES, Mesh
from parallel.nn import Model
from parallel.optim import SGD, Adam, AdamW, Disk, HostMemory, Storage
from parallel.options import device_namespace
from parallel.run import Trainer
from parallel.sharding import HalfPrecision, Int8Blocks, PowerSGD, Sharding, choose_group_size
from parallel.strategies import AsyncParameterServer, Elastic, SyncParameterServer

OPTIMIZERS = {"adam": Adam, "adamw": AdamW, "sgd": SGD}
HOOKS = ("float16", "bfloat16", "int8", "powersgd:RANK")

Named = dict[str, tuple[Callable[..., Any], tuple[str, ...]]]
# Strategies by name, each with the options that some other strategies do not take: first the
# strategies that are a sharding on a mesh, then the strategies that run in another way.
SHARDINGS: Named = {
    "serial": (Sharding, ()),
    "ddp": (Sharding.ddp, ("bucket_bytes", "hook")),
    "zero1": (partial(Sharding.zero, 1), ()),
    "zero2": (partial(Sharding.zero, 2), ()),
    "zero3": (partial(Sharding.zero, 3), ("keep_after_forward",)),
    "hsdp": (Sharding.hsdp, ("keep_after_forward", "group_size")),
    "zeropp": (Sharding.zeropp, ("gradient_bits", "group_size")),
    "local-updates": (Sharding.local_updates, ("every", "outer_lr", "outer_momentum")),
}
RUNTIMES: Named = {
    "server-sync": (SyncParameterServer, ()),
    "server-async": (AsyncParameterServer, ("staleness_bound",)),
    "elastic": (Elastic, ("bucket_bytes", "kill")),
}
STRATEGIES = SHARDINGS | RUNTIMES
PLAIN = ("serial", "ddp", "zero1", "zero2", "zero3")  # these train layers that depend on the rows
DENSE_AXES = ("pipe", "context", "tensor")  # along which ranks divide a dense model, or a row
NEEDED_AXES = {"schedule": "pipe", "sequence_parallel": "tensor", "attention": "context"}


# The strategy


def name_strategy(
    num_ranks: int,
    options: argparse.Namespace,
    model_axes: Sequence[str] = DENSE_AXES,
    row_options: Sequence[str] = (),
) -> None:
    """Set `options.strategy` to the name of what ``--mesh`` and ``--zero`` ask for.

    `model_axes` and `row_options` are attributes of the model's `ModelSpec`.  Raises ValueError if
    no strategy does this; the message says what would work.
    """
    advice = partial(served, vars(options), model_axes, row_options)
    if options.mesh is None and options.zero is None:
        options.strategy = options.strategy or "ddp"
    elif options.strategy is not None:
        raise ValueError(f"--strategy takes no --mesh and no --zero{advice()}")
    else:
        axes = options.mesh or {"data": num_ranks}
        if (size := Mesh(None, **axes).size) != num_ranks:
            raise ValueError(f"a mesh of {words_of(axes, ', ')} has {size} ranks, not {num_ranks}")
        options.strategy = strategy_on(axes, options, model_axes, advice)
        if options.mesh is not None and options.strategy != "hsdp" and "data" not in axes:
            options.mesh = {"data": 1} | axes
    if row_options and options.strategy not in PLAIN:
        raise ValueError(f"{options.strategy} takes no --{row_options[0]}{advice()}")
    for name, axis in NEEDED_AXES.items():
        if getattr(options, name) is not None and axis not in (options.mesh or {}):
            raise ValueError(f"--{name.replace('_', '-')} needs --mesh with {axis}=N")


def strategy_on(
    axes: Mapping[str, int],
    options: argparse.Namespace,
    model_axes: Sequence[str],
    advice: Callable[[], str],
) -> str:
    """Return the name of the strategy on a mesh of `axes`; raise ValueError if there is none."""
    stage: int | None = options.zero
    if set(axes) <= {"data", *model_axes}:
        return f"zero{stage}" if stage else "ddp"
    if set(axes) != {"replicate", "shard"} or stage not in (None, 3):
        of_stage = "" if stage is None else f" with --zero {stage}"
        raise ValueError(f"no strategy trains on --mesh {words_of(axes)}{of_stage}{advice()}")
    if options.group_size is not None:
        raise ValueError(
            "--mesh takes no --group-size, which is the size of its axis shard;"
            " this works: --mesh replicate=G,shard=N on G x N ranks"
        )
    return "hsdp"


def served(given: Mapping[str, Any], model_axes: Sequence[str], row_options: Sequence[str]) -> str:
    """Return the end of a sentence: what trains with the other options `given` on several ranks."""
    needed = [f"{axis}=N" for name, axis in NEEDED_AXES.items() if given.get(name)]
    names = [name for name in PLAIN if name != "serial" and not untaken(name, given)]
    if given.get("schedule") == "pipedream":  # whose stages update alone
        names = [name for name in names if name == "ddp"]
    ways = []
    if names:
        stages = [name.removeprefix("zero").replace("ddp", "0") for name in names]
        axes = [axis for axis in AXES if axis in ("data", *model_axes)]
        words = listed(needed, "and") if needed else f"any of {listed(axes, 'and')}"
        ways.append(f"--mesh with {words} and --zero {listed(stages, 'or')}")
    if not (row_options or needed or given.get("group_size") or untaken("hsdp", given)):
        ways.append("--mesh replicate=G,shard=N with --zero 3 on G x N ranks")
    if names and not needed:
        ways.append(f"--strategy {listed(names, 'or')}")
    return f"; this works: {', or '.join(ways)}" if ways else ""


def listed(words: Sequence[str], last: str) -> str:
    """Return words such as "a, b or c", with a word before the `last` one."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def untaken(strategy: str, options: Mapping[str, Any]) -> list[str]:
    """Return the given `options` that other strategies take and this one does not.

    Options that need an axis, such as ``--schedule``, are not among them.
    """
    known = {"algorithm"}.union(*(names for _, names in STRATEGIES.values()))
    taken = {*STRATEGIES[strategy][1], *(["algorithm"] * (strategy != "serial"))}
    return sorted(name for name in known - taken if options.get(name) is not None)


def title(options: argparse.Namespace) -> str:
    """Return what trains, in words such as ``"zero1 on pipe=2,data=2 by zb-v"``.

    `name_strategy` has set the name.
    """
    words = [options.strategy]
    if options.mesh:
        words.append(f"on {words_of(options.mesh)}")
    if options.schedule:
        words.append(f"by {options.schedule}")
    return " ".join(words)


def words_of(axes: Mapping[str, int], separator: str = ",") -> str:
    """Return "data=2,tensor=2" for {"data": 2, "tensor": 2}."""
    return separator.join(f"{axis}={size}" for axis, size in axes.items())


# What trains


def mesh_of(
    comm: Communicator,
    options: argparse.Namespace,
    model_axes: Sequence[str] = DENSE_AXES,
    row_options: Sequence[str] = (),
) -> Mesh | None:
    """Return the mesh of ``--mesh`` for the model; None if no mesh divides the model.

    `model_axes` and `row_options` are as in `name_strategy`.
    """
    axes = model_mesh(options, model_axes, row_options)
    return None if axes is None else Mesh(comm, **axes)


def model_mesh(
    options: argparse.Namespace,
    model_axes: Sequence[str] = DENSE_AXES,
    row_options: Sequence[str] = (),
) -> dict[str, int] | None:
    """Return the axes of the mesh for the model; None if no mesh divides the model."""
    axes: dict[str, int] = options.mesh or {}
    needs_ranks = bool(row_options) and options.strategy != "serial"
    return axes if needs_ranks or set(axes) & set(model_axes) else None


class Sharded(NamedTuple):
    """A strategy that is a sharding on a mesh, with other arguments of `Trainer` and `Layout`."""

    axes: dict[str, int]
    sharding: Sharding
    options: dict[str, Any]


def sharded(
    strategy: str, options: Mapping[str, Any], num_ranks: int, axes: Mapping[str, int] | None = None
) -> Sharded:
    """Return a strategy of `SHARDINGS`, or the synchronous server, on `num_ranks` ranks.

    `axes` are the axes of the mesh of the model, if a mesh divides the model.  Raises ValueError
    for options that the strategy does not take, and if the strategy cannot use these ranks.
    """
    given = taken_options(strategy, options, is_divided=axes is not None)
    more = {name: given.pop(name) for name in [*given] if name in ("algorithm", "schedule")}
    group_size = given.pop("group_size", None)
    if strategy == "server-sync":
        return Sharded(
            {"data": num_ranks}, Sharding.parameter_server(), {"algorithm": "linear"} | more
        )
    if axes is not None:
        given["axes"] = tuple(axis for axis in ROW_AXES if axis in axes)
    sharding = SHARDINGS[strategy][0](**given)
    if axes is None:
        axes = options.get("mesh") or default_axes(sharding, num_ranks, group_size)
    return Sharded(dict(axes), sharding, more)


def default_axes(sharding: Sharding, num_ranks: int, group_size: int | None) -> dict[str, int]:
    """Return the axes of a mesh for a sharding; groups are consecutive ranks."""
    if not sharding.axes and num_ranks > 1:
        raise ValueError(f"the serial strategy runs on one rank, not on {num_ranks}")
    if "shard" in sharding.axes:
        size = choose_group_size(num_ranks, group_size)
        return {"replicate": num_ranks // size, "shard": size}
    return {"data": num_ranks}


def taken_options(
    strategy: str, options: Mapping[str, Any], *, is_divided: bool = False
) -> dict[str, Any]:
    """Return the `options` that are given and belong to a strategy.

    Raises ValueError for options that the strategy does not take.
    """
    if unknown := untaken(strategy, options):
        words = ", ".join("--" + name.replace("_", "-") for name in unknown)
        raise ValueError(f"the strategy {strategy} takes no {words}")
    names = (*STRATEGIES[strategy][1], "algorithm", *(["schedule"] * is_divided))
    given = {name: options[name] for name in names if options.get(name) is not None}
    if "hook" in given:
        given["hook"] = comm_hook(given["hook"])  # one for each rank, because it may have a state
    return given


def trainer_factory(
    comm: Communicator,
    model: Model,
    recipe: Recipe,
    strategy: str,
    options: Mapping[str, Any],
    mesh: Mesh | None = None,
) -> Callable[..., Trainer]:
    """Return a function of `phase` that makes the training run of a strategy, with its `options`.

    All ranks call that function together, because it makes communicators; nothing is sent here.
    `mesh` is the mesh that divides the model, if there is one (`mesh_of`).  Raises ValueError as
    `sharded` does.
    """
    if strategy in RUNTIMES:
        given = taken_options(strategy, options, is_divided=mesh is not None)
        return partial(RUNTIMES[strategy][0], comm, model, recipe, **given)
    axes, sharding, more = sharded(
        strategy, options, comm.size, None if mesh is None else mesh.axes
    )
    mesh = mesh or Mesh(comm if sharding.axes else None, **axes)
    return partial(Trainer, mesh, model, recipe, sharding=sharding, **more)


def layout_of(
    num_ranks: int,
    make: Callable[[Mesh | None], Model],
    recipe: Recipe,
    strategy: str,
    options: Mapping[str, Any],
    model_axes: Mapping[str, int] | None = None,
) -> Layout:
    """Return the layout of the trainer of `trainer_factory`, for ranks that need not exist.

    `make` is called with the mesh of the model, if it has `model_axes`, or with None.
    """
    axes, sharding, more = sharded(strategy, options, num_ranks, model_axes)
    mesh = Mesh(None, **axes)
    model = make(mesh if model_axes else None)
    return Layout(mesh, model, recipe, sharding=sharding, **more)


def make_recipe(comm: Communicator, options: argparse.Namespace) -> Recipe:
    """Return the recipe of the options, which does not depend on the strategy."""
    return Recipe(
        dtype=options.dtype,
        optimizer=partial(OPTIMIZERS[options.optimizer], lr=options.lr),
        num_micro_batches=options.micro_batches,
        clip=options.clip,
        seed=options.seed,
        offload=storage_of(options.offload),
        offload_activations=storage_of(options.offload_activations),
        xp=device_namespace(options.device, comm),
        reduce_dtype=options.reduce_dtype,
    )


def comm_hook(name: str) -> HalfPrecision | Int8Blocks | PowerSGD:
    """Return the communication hook of this name."""
    if name in ("float16", "bfloat16"):
        return HalfPrecision(name)
    if name == "int8":
        return Int8Blocks()
    kind, _, rank = name.partition(":")
    if kind != "powersgd" or not rank.isdecimal():
        raise ValueError(f"there is no hook {name!r}; choose {', '.join(HOOKS)}")
    return PowerSGD(int(rank))


def storage_of(name: str | None) -> Callable[..., Storage]:
    """Return the function that makes the storage "host" or "disk:FOLDER"; None: the model's."""
    kind, _, folder = (name or "").partition(":")
    if name is None:
        return Storage
    if name == "host":
        return HostMemory
    if kind != "disk" or not folder:
        raise ValueError(f"cannot offload to {name!r}; choose host or disk:FOLDER")
    return partial(Disk, folder)
