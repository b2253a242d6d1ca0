"""PyTorch's Gloo among the ranks of an MPI job on one host.  Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from mpi4py import MPI
from torch import distributed

from bench.oracle import Array

_HOST = "127.0.0.1"


def join() -> None:
    """Make the ranks of COMM_WORLD a process group, one thread each as everywhere here.

    Rank 0 takes whatever port is free, and MPI tells the others.
    """
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    store = None
    if world.rank == 0:
        store = distributed.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    port = world.bcast(store and store.port)
    store = store or distributed.TCPStore(_HOST, port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)


def all_reduce(x: Array) -> Callable[[], None]:
    """What writes the sum of every rank's `x` into `x`."""
    return partial(distributed.all_reduce, torch.from_numpy(x))


def leave() -> None:
    """End the process group."""
    distributed.destroy_process_group()
