"""Options that several commands share: the ranks, the mesh, the model, the batch, the device."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from array_api_compat import numpy as numpy_namespace

from collectives import Communicator
from collectives.console import at_least, number
from parallel.nn import ATTENTION
from parallel.optim import DTYPES
from parallel.pipeline import SCHEDULES

Add = Callable[..., object]  # such as `argparse.ArgumentParser.add_argument`


def mesh_axes(word: str) -> dict[str, int]:
    """Return {"data": 2, "tensor": 2} for "data=2,tensor=2"; an argument type."""
    axes: dict[str, int] = {}
    for part in word.split(","):
        name, _, size = part.partition("=")
        if not name or not size.isdecimal() or name in axes:
            raise argparse.ArgumentTypeError(f"{word!r} is not AXIS=N,..., such as data=4")
        axes[name] = int(size)
    return axes


POSITIVE: dict[str, Any] = {"type": at_least(1)}
REQUIRED = object()  # in place of a default
# The options that several commands have, as `argparse` takes them.
SHARED: dict[str, dict[str, Any]] = {
    "mesh": {"type": mesh_axes, "metavar": "AXIS=N,...", "help": "such as data=2,tensor=2"},
    "zero": {"type": int, "choices": range(4), "help": "stage of ZeRO; 0: sum gradients"},
    "schedule": {"choices": SCHEDULES, "help": "of the pipeline along the axis pipe"},
    "attention": {"choices": ATTENTION, "help": "of the ranks along context"},
    "ranks": POSITIVE | {"metavar": "N", "help": "number of ranks"},
    "threads": POSITIVE | {"metavar": "N", "help": "run N ranks as threads, without MPI"},
    "batch": POSITIVE | {"help": "rows of all ranks"},
    "micro_batches": POSITIVE | {"metavar": "K", "help": "parts in which a rank has its rows"},
    "steps": POSITIVE | {"help": "number of steps"},
    "layers": POSITIVE | {"help": "number of blocks"},
    "hidden": POSITIVE | {"help": "width"},
    "heads": POSITIVE | {"help": "attention heads"},
    "context": POSITIVE | {"help": "tokens of a row"},
    "vocab_size": POSITIVE | {"help": "number of different tokens"},
    "dtype": {"choices": DTYPES, "help": "of parameters, gradients and messages"},
    "lr": {"type": float, "help": "learning rate"},
    "seed": {"type": at_least(0), "help": "of what is drawn"},
    "text": {"metavar": "PATH", "help": "file or directory; default: Python's standard library"},
    "flops": {"type": number, "metavar": "N", "help": "operations a second that a GPU reaches"},
}


def add_shared(add: Add, texts: Mapping[str, str] | None = None, **defaults: Any) -> None:
    """Add options of `SHARED`.

    Parameters
    ----------
    add : function
        A parser's `add_argument`.
    texts : mapping of str to str, optional
        Other help texts, by name.
    **defaults : object
        The names of the options, with ``_`` for ``-``, and their defaults; `REQUIRED` for none.
    """
    for name, default in defaults.items():
        text = (texts or {}).get(name, SHARED[name]["help"])
        how = {"required": True} if default is REQUIRED else {"default": default}
        if default is not None and default is not REQUIRED:
            text += (
                f"; default: {default:g}" if isinstance(default, float) else f"; default: {default}"
            )
        add(f"--{name.replace('_', '-')}", **SHARED[name] | how | {"help": text})


def add_gpt_options(add: Add) -> None:
    """Add the options of a small GPT; `add` is a parser's `add_argument`."""
    add_shared(add, layers=4, hidden=256, heads=4, context=64)
    add("--tied", action="store_true", help="use the embedding's table in the output layer")
    add("--shared", action="store_true", help="use the parameters of block 0 in all blocks")


def gpt_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_gpt_options` as arguments of `parallel.gpt`."""
    return {
        "num_layers": options.layers,
        "hidden": options.hidden,
        "num_heads": options.heads,
        "context": options.context,
        "is_tied": options.tied,
        "is_shared": options.shared,
    }


def device_namespace(device: str, comm: Communicator) -> Any:
    """Return the array namespace of a device, "cpu" or "cuda"; with it a rank uses its GPU."""
    if device == "cpu":
        return numpy_namespace
    try:
        comm.use_gpu()
    except RuntimeError as error:
        raise ValueError(f"--device cuda: {error}") from None
    from array_api_compat import cupy as cupy_namespace  # noqa: PLC0415 - an optional dependency

    return cupy_namespace
