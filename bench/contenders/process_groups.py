"""PyTorch's process groups among the ranks of an MPI job.  Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed

import collectives.torch  # noqa: F401 - registers "ring", and lets all backends meet through MPI
from bench.contenders.contender import GLOO
from bench.workloads.expected import Array

RING, NCCL = "ring", "nccl"  # names of backends, as torch.distributed has them


def join(backend: str) -> None:
    """Make the ranks of COMM_WORLD the default group, one thread each as everywhere here."""
    torch.set_num_threads(1)
    distributed.init_process_group(backend)


def join_all(device: str) -> dict[str, Any]:
    """Return a group of all ranks for our backend, the default one, and one for another."""
    join(RING)
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(distributed.get_rank() % torch.cuda.device_count())
    other = _other(device)
    return {RING: distributed.group.WORLD, other: distributed.new_group(backend=other)}


def _other(device: str) -> str:
    """Return the backend beside ours: NCCL where each rank has a GPU, else Gloo."""
    is_enough = torch.cuda.device_count() >= distributed.get_world_size()
    is_nccl = device == "cuda" and distributed.is_nccl_available() and is_enough
    return NCCL if is_nccl else GLOO


def all_reduce(x: Array, group: Any = None) -> Callable[[], None]:
    """Return what writes the sum of all ranks' `x` into `x`, by the default group or another."""
    return partial(distributed.all_reduce, torch.from_dlpack(x), group=group)


def leave() -> None:
    """End all process groups."""
    distributed.destroy_process_group()
