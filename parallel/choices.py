"""The strategies by name, made as a command line says."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from array_api_compat import numpy as numpy_namespace

from collectives import Communicator
from parallel.data import DataParallel, Hook
from parallel.elastic import Doomed, Elastic
from parallel.hooks import Compressed, Int8Blocks, PowerSGD
from parallel.hsdp import Hsdp
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


def maker(comm: Communicator, model: Model, options: argparse.Namespace) -> Callable[..., Strategy]:
    """What makes the strategy that the options name; called by all ranks, for it may talk to them.

    Nothing is sent here.  ValueError for options that do not go with the strategy.
    """
    kind, own = STRATEGIES[options.strategy]
    known = {name for _, names in STRATEGIES.values() for name in names}
    given = {name: getattr(options, name) for name in known if getattr(options, name) is not None}
    if strangers := sorted(given.keys() - set(own)):
        words = ", ".join("--" + name.replace("_", "-") for name in strangers)
        raise ValueError(f"the strategy {options.strategy} takes no {words}")
    if options.algorithm is not None and options.strategy == "serial":
        raise ValueError("the strategy serial takes no --algorithm")
    if options.algorithm is not None:
        given["algorithm"] = options.algorithm
    if options.strategy == "elastic":
        given.setdefault("kill", (-1, -1))
    if "hook" in given:
        given["hook"] = hook(given["hook"])  # one of each rank's own, for it may keep a state
    return partial(kind, comm, model, recipe(comm, model, options), **given)


def check_saving(options: argparse.Namespace) -> None:
    """ValueError where a checkpoint that was asked for could not be made."""
    if options.save_every is not None and options.save is None:
        raise ValueError("--save-every needs --save, which says where")
    if options.save_every is not None and options.strategy == "server-async":
        raise ValueError("server-async saves at the end only: until then no two ranks are in step")
    if (options.hook or "").startswith("powersgd") and (options.save or options.resume):
        raise ValueError("powersgd takes no --save or --resume: what it remembers is not saved")
    if options.strategy == "elastic" and (options.save or options.resume):
        raise ValueError("the elastic strategy takes no --save or --resume")


def recipe(comm: Communicator, model: Model, options: argparse.Namespace) -> Recipe:
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
        xp=namespace(options.device, comm.rank),
    )


def namespace(device: str, rank: int) -> Any:
    """Where arrays are: NumPy's namespace, or ("cuda") CuPy's, with a GPU for each rank in turn.

    ValueError where there is no CuPy or no GPU.
    """
    if device == "cpu":
        return numpy_namespace
    try:
        import cupy  # noqa: PLC0415 - only who asks for a GPU needs it
        from array_api_compat import cupy as cupy_namespace  # noqa: PLC0415

        cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
    except Exception as error:  # noqa: BLE001 - no CuPy, no driver, no GPU: each has its own
        raise ValueError(f"--device cuda needs CuPy and a GPU: {error}") from None
    return cupy_namespace


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
