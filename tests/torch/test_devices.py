"""Tensors on a device, which here is the fake GPU: calls in the order of streams."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
import torch.distributed as dist

from tests.fake_device import BACKEND
from tests.fake_driver import gpu
from tests.torch.device_program import PROGRAMS
from tests.torch.places import OnFake, fake_place

pytestmark = pytest.mark.mpi


@cache
def go_on_alone() -> None:
    gpu().go_on_alone()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, ranks: range) -> Iterator[OnFake]:
    """The fake GPU as it is at first; afterwards nothing was done that CUDA forbids."""
    go_on_alone()
    BACKEND.reset()
    gpu().reset(seed=dist.get_rank())
    with fake_place(monkeypatch) as place:
        yield place
        if dist.is_initialized():
            dist.destroy_process_group()
    gpu().check()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_right(place: OnFake, name: str) -> None:
    PROGRAMS[name](place)
