"""Ranks stay in step as in the MPI tier, and every test has a default process group of its own.

Collected under mpirun where torch is installed (`tests/conftest.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import collectives.torch
from tests.mpi.conftest import *  # noqa: F403 - the hooks that keep ranks in step, and `world`
from tests.torch.groups import default_group

HERE = Path(__file__).parent

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it uses parts of PyTorch that are going to be removed
    import torch.distributed.optim

assert "ring" in dist.Backend.backend_list, collectives.torch
torch.set_num_threads(1)  # the ranks share the cores


@pytest.fixture
def ranks() -> Iterator[range]:
    """The ranks of a default process group with the backend "ring"."""
    with default_group() as ranks:
        yield ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Newer versions of PyTorch warn of names that are the only ones of older versions."""
    for item in items:
        if item.path.parent == HERE:
            for category in (DeprecationWarning, FutureWarning):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{category.__name__}"))
