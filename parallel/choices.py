"""The strategies by name, made as a command line says."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import collectives
from collectives import Communicator
from parallel.data import DataParallel, Hook
from parallel.elastic import Doomed, Elastic
from parallel.hooks import Compressed, Int8Blocks, PowerSGD
from parallel.hsdp import Hsdp, group_size
from parallel.offload import Device, Disk, Host, Place
from parallel.optim import SGD, Adam, AdamW
from parallel.server import ServerAsync, ServerSync
from parallel.strategy import Recipe, Strategy
from parallel.zero import Zero1, Zero2, Zero3
from parallel.zeropp import ZeroPlusPlus

if TYPE_CHECKING:
    from parallel.nn import Model

OPTIMIZERS = {"adam": Adam, "adamw": AdamW, "sgd": SGD}
HOOKS = ("float16", "bfloat16", "int8", "powersgd:RANK")

Make = Callable[..., Strategy]


def serial(comm: Communicator, *given: Any, **more: Any) -> Strategy:
    """The reference.  ValueError on more than one rank: they would all do the same."""
    if comm.size > 1:
        raise ValueError(f"the serial strategy runs on one rank, not on {comm.size}")
    return Strategy(None, *given, **more)


def elastic(comm: Communicator, *given: Any, **more: Any) -> Strategy:
    """Data parallel over the ranks that are alive.  ValueError where all must live."""
    if not comm.can_shrink:
        raise ValueError(
            "the elastic strategy needs an Open MPI that was started with fault tolerance: "
            "python -m collectives.launch --fault-tolerant"
        )
    victim, last_step = more.pop("kill")
    strategy = (Doomed if comm.rank == victim else Elastic)(comm, *given, **more)
    if isinstance(strategy, Doomed):
        strategy.last_step = last_step
    return strategy


# What each takes from the command line, beside what all take.
STRATEGIES: dict[str, tuple[Make, tuple[str, ...]]] = {
    "serial": (serial, ()),
    "server-sync": (ServerSync, ()),
    "server-async": (ServerAsync, ("bound",)),
    "ddp": (DataParallel, ("bucket_bytes", "hook")),
    "zero1": (Zero1, ()),
    "zero2": (Zero2, ()),
    "zero3": (Zero3, ("keep_after_forward",)),
    "hsdp": (Hsdp, ("keep_after_forward", "group")),
    "zeropp": (ZeroPlusPlus, ("group",)),
    "elastic": (elastic, ("bucket_bytes", "kill")),
}


def make(comm: Communicator, model: Model, options: argparse.Namespace, **more: Any) -> Strategy:
    """The strategy that the options name.  ValueError for options that do not go with it."""
    kind, own = STRATEGIES[options.strategy]
    known = {name for _, names in STRATEGIES.values() for name in names}
    given = {name: getattr(options, name) for name in known if getattr(options, name) is not None}
    if strangers := sorted(given.keys() - set(own)):
        words = ", ".join("--" + name.replace("_", "-") for name in strangers)
        raise ValueError(f"the strategy {options.strategy} takes no {words}")
    if options.algorithm is not None:
        require_algorithm(options, comm.size)
        more["algorithm"] = options.algorithm
    if options.strategy == "elastic":
        given.setdefault("kill", (-1, -1))
    if "hook" in given:
        given["hook"] = hook(given["hook"])  # one of each rank's own, for it may keep a state
    return kind(comm, model, recipe(model, options), **given, **more)


def check_saving(options: argparse.Namespace) -> None:
    """ValueError where a checkpoint that was asked for could not be made."""
    if options.save_every is not None and options.save is None:
        raise ValueError("--save-every needs --save, which says where")
    if options.save_every is not None and options.strategy == "server-async":
        raise ValueError("server-async saves at the end only: until then no two ranks are in step")
    if options.strategy == "elastic" and (options.save or options.resume):
        raise ValueError("the elastic strategy takes no --save or --resume")


def require_algorithm(options: argparse.Namespace, size: int) -> None:
    """ValueError if a collective has no such algorithm, or it does not do on so many ranks."""
    if not (collectives_of := large_collectives(options, size)):
        raise ValueError(f"the strategy {options.strategy} takes no --algorithm")
    for collective, sizes in collectives_of.items():
        info = collectives.algorithms.info(collective, options.algorithm)
        if wrong := [n for n in sizes if not info.serves(n)]:
            raise ValueError(f"{collective}.{options.algorithm} does not run on {wrong[0]} ranks")
        if not info.is_bitwise:
            raise ValueError(
                f"by {collective}.{options.algorithm} ranks get other last bits,"
                " and so parameters that differ"
            )


def large_collectives(options: argparse.Namespace, size: int) -> dict[str, Iterable[int]]:
    """What --algorithm is of, each with the numbers of ranks that call it together."""
    match options.strategy:
        case "server-sync":
            return {"broadcast": [size], "reduce": [size]}
        case "server-async":
            return {"broadcast": [size]}
        case "ddp":
            return {"all_reduce": [size]}
        case "elastic":
            return {"all_reduce": range(1, size + 1)}
        case "zero1" | "zero2" | "zero3":
            return {"reduce_scatter": [size], "all_gather": [size]}
        case "hsdp":
            group = group_size(size, options.group)
            groups = size // group
            return {"reduce_scatter": [group], "all_gather": [group], "all_reduce": [groups]}
        case "zeropp":
            return {"all_gather": [size, group_size(size, options.group)]}
    return {}


def recipe(model: Model, options: argparse.Namespace) -> Recipe:
    """What does not depend on the strategy."""
    blocks = [name for name in model.layers if name.startswith("block")]
    return Recipe(
        dtype=options.dtype,
        optimizer=partial(OPTIMIZERS[options.optimizer], lr=options.lr),
        micro_batches=options.micro_batches,
        clip=options.clip,
        recompute=blocks if options.recompute else (),
        seed=options.seed,
        place=place(options.offload),
    )


def hook(word: str) -> Hook:
    """What sums a bucket of gradients.  ValueError for an unknown word."""
    if word in ("float16", "bfloat16"):
        return Compressed(word)
    if word == "int8":
        return Int8Blocks()
    name, _, rank = word.partition(":")
    if name != "powersgd" or not rank.isdecimal():
        raise ValueError(f"no hook {word!r}; there are {', '.join(HOOKS)}")
    return PowerSGD(int(rank))


def place(word: str | None) -> Callable[..., Place]:
    """Where updates are made: on the device, "host", or "disk:FOLDER".  ValueError for others."""
    name, _, folder = (word or "").partition(":")
    if word is None:
        return Device
    if word == "host":
        return Host
    if name != "disk" or not folder:
        raise ValueError(f"no place {word!r} to offload to; there are host and disk:FOLDER")
    return partial(Disk, folder)
