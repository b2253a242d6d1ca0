"""Strategies, optimizers and hooks by name, and how to make them from command-line options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from collectives import Communicator
from parallel.cli import device_namespace
from parallel.comm_hooks import HalfPrecision, Int8Blocks, PowerSGD
from parallel.data_parallel import CommHook, DataParallel
from parallel.elastic import Elastic, FaultInjectingElastic
from parallel.hsdp import HSDP
from parallel.nn import Model
from parallel.offload import DiskOffload, HostOffload, NoOffload, Offload
from parallel.optim import SGD, Adam, AdamW
from parallel.parameter_server import AsyncParameterServer, SyncParameterServer
from parallel.strategy import Recipe, Strategy
from parallel.zero import Zero1, Zero2, Zero3
from parallel.zero_plus_plus import ZeroPlusPlus

OPTIMIZERS = {"adam": Adam, "adamw": AdamW, "sgd": SGD}
HOOKS = ("float16", "bfloat16", "int8", "powersgd:RANK")

StrategyFactory = Callable[..., Strategy]


def serial(comm: Communicator, *args: Any, **options: Any) -> Strategy:
    """Return the reference.  Raise ValueError on more than one rank: all would do the same."""
    if comm.size > 1:
        raise ValueError(f"the serial strategy runs on one rank, not on {comm.size}")
    return Strategy(None, *args, **options)


def elastic(
    comm: Communicator, *args: Any, kill: tuple[int, int] = (-1, -1), **options: Any
) -> Strategy:
    """Return an `Elastic`; on rank ``kill[0]``, one that kills its process in step ``kill[1]``.

    Raises ValueError if the MPI cannot continue after a failure.
    """
    if not comm.can_shrink:
        raise ValueError(
            "the elastic strategy needs an Open MPI that was started with fault tolerance: "
            "python -m collectives.launch --fault-tolerant"
        )
    victim, last_step = kill
    if comm.rank != victim:
        return Elastic(comm, *args, **options)
    strategy = FaultInjectingElastic(comm, *args, **options)
    strategy.last_step = last_step
    return strategy


# Each with the options that not all strategies take.
STRATEGIES: dict[str, tuple[StrategyFactory, tuple[str, ...]]] = {
    "serial": (serial, ()),
    "server-sync": (SyncParameterServer, ()),
    "server-async": (AsyncParameterServer, ("staleness_bound",)),
    "ddp": (DataParallel, ("bucket_bytes", "hook")),
    "zero1": (Zero1, ()),
    "zero2": (Zero2, ()),
    "zero3": (Zero3, ("keep_after_forward",)),
    "hsdp": (HSDP, ("keep_after_forward", "group_size")),
    "zeropp": (ZeroPlusPlus, ("group_size",)),
    "elastic": (elastic, ("bucket_bytes", "kill")),
}


def strategy_factory(
    comm: Communicator, model: Model, options: argparse.Namespace
) -> StrategyFactory:
    """Return a function that makes the strategy that the options name.

    All ranks must call that function together, because some strategies make communicators.  It
    takes the keyword argument ``phase``.  Nothing is sent here.  Raises ValueError for options that
    the strategy does not take.
    """
    factory, names = STRATEGIES[options.strategy]
    known = {name for _, names in STRATEGIES.values() for name in names}
    given = {name: getattr(options, name) for name in known if getattr(options, name) is not None}
    if unknown := sorted(given.keys() - set(names)):
        words = ", ".join("--" + name.replace("_", "-") for name in unknown)
        raise ValueError(f"the strategy {options.strategy} takes no {words}")
    if options.algorithm is not None and options.strategy == "serial":
        raise ValueError("the strategy serial takes no --algorithm")
    if options.algorithm is not None:
        given["algorithm"] = options.algorithm
    if "hook" in given:
        given["hook"] = comm_hook(given["hook"])  # one for each rank, because it may have a state
    return partial(factory, comm, model, make_recipe(comm, model, options), **given)


def check_saving(options: argparse.Namespace) -> None:
    """Raise ValueError if the checkpoints that the options ask for are not possible."""
    if options.save_every is not None and options.save is None:
        raise ValueError("--save-every needs --save, the directory of the checkpoints")
    if options.save_every is not None and options.strategy == "server-async":
        raise ValueError(
            "server-async takes no --save-every: its ranks have made the same steps at the end only"
        )
    if (options.hook or "").startswith("powersgd") and (options.save or options.resume):
        raise ValueError(
            "powersgd takes no --save or --resume: checkpoints do not contain its errors"
        )
    if options.strategy == "elastic" and (options.save or options.resume):
        raise ValueError("the elastic strategy takes no --save or --resume")


def make_recipe(comm: Communicator, model: Model, options: argparse.Namespace) -> Recipe:
    """Return the recipe of the options, which does not depend on the strategy."""
    blocks = [name for name in model.layers if name.startswith("block")]
    return Recipe(
        dtype=options.dtype,
        optimizer=partial(OPTIMIZERS[options.optimizer], lr=options.lr),
        num_micro_batches=options.micro_batches,
        clip=options.clip,
        recompute=blocks if options.recompute else (),
        seed=options.seed,
        offload=offload_factory(options.offload),
        xp=device_namespace(options.device, comm.rank),
    )


def comm_hook(name: str) -> CommHook:
    """Return the communication hook of this name.  Raise ValueError for an unknown one."""
    if name in ("float16", "bfloat16"):
        return HalfPrecision(name)
    if name == "int8":
        return Int8Blocks()
    kind, _, rank = name.partition(":")
    if kind != "powersgd" or not rank.isdecimal():
        raise ValueError(f"there is no hook {name!r}; choose {', '.join(HOOKS)}")
    return PowerSGD(int(rank))


def offload_factory(name: str | None) -> Callable[..., Offload]:
    """Return the `Offload` for None, "host" or "disk:FOLDER".  Raise ValueError for others."""
    kind, _, folder = (name or "").partition(":")
    if name is None:
        return NoOffload
    if name == "host":
        return HostOffload
    if kind != "disk" or not folder:
        raise ValueError(f"cannot offload to {name!r}; choose host or disk:FOLDER")
    return partial(DiskOffload, folder)
