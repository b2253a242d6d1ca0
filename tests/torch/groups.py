"""Default process groups, one after the other in one job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_numbers = count()


@cache
def _store() -> dist.Store:
    """The store by which the ranks find each other in all tests: to connect to one takes time."""
    store, _, _ = next(rendezvous("env://"))
    return store


@contextmanager
def default_group(backend: str = "ring", **named: Any) -> Iterator[range]:
    """Make a default process group for a while; gives its ranks."""
    store = dist.PrefixStore(f"default group {next(_numbers)}", _store())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **named)
    try:
        yield range(size)
    finally:
        if dist.is_initialized():  # a test may destroy it
            dist.destroy_process_group()
