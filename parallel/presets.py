"""Strategies, optimizers and hooks by name, and how to make them from command-line options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from collectives import Communicator
from parallel.cli import device_namespace
from parallel.elastic import Elastic
from parallel.mesh import AXES, ROW_AXES, Mesh
from parallel.nn import Model
from parallel.optim import SGD, Adam, AdamW
from parallel.places import Disk, HostMemory, Place
from parallel.runtime import Recipe, Trainer
from parallel.servers import AsyncParameterServer, SyncParameterServer
from parallel.sharding import HalfPrecision, Int8Blocks, PowerSGD, Sharding, choose_group_size

OPTIMIZERS = {"adam": Adam, "adamw": AdamW, "sgd": SGD}
HOOKS = ("float16", "bfloat16", "int8", "powersgd:RANK")
RECOMPUTE = {"all": ("block*",), "attention": ("block*.attention.heads",), "none": ()}

# Of --moe: those of the gate, and those of the layer.
GATE_OPTIONS = {"top_k": "k", "capacity_factor": "capacity_factor", "capacity_rule": "rule"}
MOE_OPTIONS = {
    "moe_every": "every", "shared_experts": "num_shared", "padding": "padding",
    "dispatch_parts": "num_parts", "payload": "payload", "dispatch": "dispatch",
    "expert_dropout": "expert_dropout", "rows_per_group": "rows_per_group",
}  # fmt: skip


def given_options(options: argparse.Namespace, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that are on the command line, by the names to which `names` maps theirs.

    A 0 is one of them: whether it is allowed is for what takes it to say.
    """
    values = {name: getattr(options, key, None) for key, name in names.items()}
    return {name: value for name, value in values.items() if value is not None}


ROW_OPTIONS = ("moe", "dropout")  # of layers that depend on the rows of each rank
PLAIN = ("serial", "ddp", "zero1", "zero2", "zero3")  # the strategies that train these

Named = dict[str, tuple[Callable[..., Any], tuple[str, ...]]]
# Strategies by name, each with the options that not all of them take: those that are a sharding on
# a mesh with its axes, and those that run in another way.
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
MODEL_AXES = ("pipe", "context", "expert", "tensor")  # along which ranks divide the model, or a row
NEEDED_AXES = {"schedule": "pipe", "sequence_parallel": "tensor", "attention": "context"}


def name_strategy(comm: Communicator, options: argparse.Namespace) -> None:
    """Set `options.strategy` to the name of what ``--mesh`` and ``--zero`` ask for.

    Raises ValueError for what no strategy does; the message says what would work.
    """
    if options.mesh is None and options.zero is None:
        options.strategy = options.strategy or "ddp"
        check_model_options(options)
        return
    if options.strategy is not None:
        raise ValueError(f"--strategy takes no --mesh and no --zero{served(options)}")
    axes, stage = options.mesh or {"data": comm.size}, options.zero
    Mesh(comm, **axes)  # raises if it is not one of these ranks
    if set(axes) <= {"data", *MODEL_AXES}:
        if options.mesh is not None:
            options.mesh = axes if "data" in axes else {"data": 1} | axes
        options.strategy = f"zero{stage}" if stage else "ddp"
    elif set(axes) == {"replicate", "shard"} and stage in (None, 3):
        if options.group_size is not None:
            raise ValueError(
                "--mesh takes no --group-size, which is the size of its axis shard;"
                " this works: --mesh replicate=G,shard=N on G x N ranks"
            )
        options.strategy = "hsdp"
    else:
        words = ",".join(f"{axis}={size}" for axis, size in axes.items())
        of_stage = "" if stage is None else f" with --zero {stage}"
        advice = served(options)
        raise ValueError(f"no strategy trains on --mesh {words}{of_stage}{advice}")
    check_model_options(options)


def served(options: argparse.Namespace) -> str:
    """Return the end of a sentence: what trains with the other `options` on several ranks."""
    given = vars(options)
    needed = [f"{axis}=N" for name, axis in NEEDED_AXES.items() if given.get(name)]
    names = [name for name in PLAIN if name != "serial" and not untaken(name, given)]
    if given.get("schedule") == "pipedream":  # whose stages update alone
        names = [name for name in names if name == "ddp"]
    ways = []
    if names:
        stages = [name.removeprefix("zero").replace("ddp", "0") for name in names]
        ways.append(f"--mesh with {axes_of(given, needed)} and --zero {listed(stages, 'or')}")
    is_of_rows = any(given.get(name) for name in ROW_OPTIONS)
    if not (is_of_rows or needed or given.get("group_size") or untaken("hsdp", given)):
        ways.append("--mesh replicate=G,shard=N with --zero 3 on G x N ranks")
    if names and not needed:
        ways.append(f"--strategy {listed(names, 'or')}")
    return f"; this works: {', or '.join(ways)}" if ways else ""


def axes_of(options: Mapping[str, Any], needed: Sequence[str]) -> str:
    """Return the axes that a mesh may have with these `options`, or those that are `needed`."""
    if needed:
        return listed(needed, "and")
    axes = [axis for axis in AXES if axis in ("data", *MODEL_AXES)]
    return "any of " + listed([x for x in axes if x != "expert" or options.get("moe")], "and")


def listed(words: Sequence[str], last: str) -> str:
    """Return words such as "a, b or c", with a word before the `last` one."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def untaken(strategy: str, options: Mapping[str, Any]) -> list[str]:
    """Return those of the `options` of some strategies that are given and this one does not take.

    What needs an axis, such as ``--schedule``, is not among them.
    """
    known = {"algorithm"}.union(*(names for _, names in STRATEGIES.values()))
    taken = {*STRATEGIES[strategy][1], *(["algorithm"] * (strategy != "serial"))}
    return sorted(name for name in known - taken if options.get(name) is not None)


def check_model_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options of axes that the mesh does not have."""
    axes = options.mesh or {}
    has_gate = getattr(options, "moe", None) is not None
    if "expert" in axes and not has_gate:
        raise ValueError("--mesh with expert=N needs --moe GATE")
    for name in (*GATE_OPTIONS, *MOE_OPTIONS) if not has_gate else ():
        if getattr(options, name, None) is not None:
            raise ValueError(f"--{name.replace('_', '-')} needs --moe GATE")
    for name in ROW_OPTIONS:
        if getattr(options, name, None) and options.strategy not in PLAIN:
            advice = served(options)
            raise ValueError(f"{options.strategy} takes no --{name}{advice}")
    if has_gate and options.sequence_parallel:
        raise ValueError("--moe takes no --sequence-parallel")
    for name, axis in NEEDED_AXES.items():
        if getattr(options, name, None) is not None and axis not in axes:
            word = name.replace("_", "-")
            raise ValueError(f"--{word} needs --mesh with {axis}=N")


def title(options: argparse.Namespace) -> str:
    """Return what trains, in words such as ``"zero1 on pipe=2,data=2 by zb-v"``.

    `name_strategy` has set the name.
    """
    words = [options.strategy]
    if options.mesh:
        words.append("on " + ",".join(f"{axis}={size}" for axis, size in options.mesh.items()))
    if options.schedule:
        words.append(f"by {options.schedule}")
    return " ".join(words)


def mesh_of(comm: Communicator, options: argparse.Namespace) -> Mesh | None:
    """Return the mesh for the model of ``--mesh``; None if it divides no model."""
    axes = options.mesh or {}
    needs_rows = any(getattr(options, name, None) for name in ROW_OPTIONS)
    needs_ranks = needs_rows and options.strategy != "serial"
    if not set(axes) & set(MODEL_AXES) and not needs_ranks:
        return None
    return Mesh(comm, **axes)


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
    `mesh` is that of the model, if it is divided (`mesh_of`).  Raises ValueError for options that
    the strategy does not take.
    """
    if unknown := untaken(strategy, options):
        words = ", ".join("--" + name.replace("_", "-") for name in unknown)
        raise ValueError(f"the strategy {strategy} takes no {words}")
    make, names = STRATEGIES[strategy]
    taken = (*names, "algorithm", *(["schedule"] * (mesh is not None)))
    given = {name: options[name] for name in taken if options.get(name) is not None}
    if "hook" in given:
        given["hook"] = comm_hook(given["hook"])  # one for each rank, because it may have a state
    if strategy in RUNTIMES:
        return partial(make, comm, model, recipe, **given)
    of_trainer = {name: given.pop(name) for name in ("algorithm", "schedule") if name in given}
    group_size = given.pop("group_size", None)
    if mesh is not None:
        given["axes"] = tuple(axis for axis in ROW_AXES if axis in mesh.axes)
    sharding = make(**given)
    mesh = mesh or mesh_for(comm, sharding, options.get("mesh"), group_size)
    return partial(Trainer, mesh, model, recipe, sharding=sharding, **of_trainer)


def mesh_for(
    comm: Communicator, sharding: Sharding, axes: dict[str, int] | None, group_size: int | None
) -> Mesh:
    """Return a mesh of `axes`, by default those of a sharding; groups are consecutive ranks."""
    if not sharding.axes and comm.size > 1:
        raise ValueError(f"the serial strategy runs on one rank, not on {comm.size}")
    if axes is None and "shard" in sharding.axes:
        size = choose_group_size(comm.size, group_size)
        axes = {"replicate": comm.size // size, "shard": size}
    return Mesh(comm if sharding.axes else None, **axes or {})


def check_saving(options: argparse.Namespace) -> None:
    """Raise ValueError if the checkpoints that the options ask for are not possible."""
    if options.save_every is not None and options.save is None:
        raise ValueError("--save-every needs --save, the directory of the checkpoints")
    if options.save_every is not None and options.strategy == "server-async":
        raise ValueError(
            "server-async takes no --save-every: its ranks have made the same steps at the end only"
        )
    every = options.every or Sharding.local_updates().every
    if options.strategy == "local-updates" and every and (options.save_every or 0) % every:
        raise ValueError(
            f"--save-every {options.save_every} is no multiple of --every {every}: between, ranks"
            " have different parameters"
        )
    if options.strategy == "elastic" and (options.save or options.resume):
        raise ValueError("the elastic strategy takes no --save or --resume")


def make_recipe(comm: Communicator, options: argparse.Namespace) -> Recipe:
    """Return the recipe of the options, which does not depend on the strategy."""
    return Recipe(
        dtype=options.dtype,
        optimizer=partial(OPTIMIZERS[options.optimizer], lr=options.lr),
        num_micro_batches=options.micro_batches,
        clip=options.clip,
        seed=options.seed,
        offload=place_of(options.offload),
        offload_activations=place_of(options.offload_activations),
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


def place_of(name: str | None) -> Callable[..., Place]:
    """Return what makes the place "host" or "disk:FOLDER"; by default, that of the model."""
    kind, _, folder = (name or "").partition(":")
    if name is None:
        return Place
    if name == "host":
        return HostMemory
    if kind != "disk" or not folder:
        raise ValueError(f"cannot offload to {name!r}; choose host or disk:FOLDER")
    return partial(Disk, folder)
