"""PyTorch's process groups among the ranks of an MPI job.  Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed

import collectives.torch  # noqa: F401 - registers "ring", and lets all backends meet through MPI
from bench.oracle import Array
from bench.torch.cases import BACKENDS


def join(backend: str) -> None:
    """Make the ranks of COMM_WORLD the default group, one thread each as everywhere here."""
    torch.set_num_threads(1)
    distributed.init_process_group(backend)


def join_all() -> dict[str, Any]:
    """A group of all ranks for each backend; that of the first is the default group."""
    first, *others = BACKENDS
    join(first)
    groups = {name: distributed.new_group(backend=name) for name in others}
    return {first: distributed.group.WORLD, **groups}


def all_reduce(x: Array, group: Any = None) -> Callable[[], None]:
    """What writes the sum of every rank's `x` into `x`, by the default group or by another."""
    return partial(distributed.all_reduce, torch.from_numpy(x), group=group)


def leave() -> None:
    """End all process groups."""
    distributed.destroy_process_group()
