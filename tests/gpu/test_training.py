"""Training on a GPU: the losses of the host, the same traffic, and every byte that crosses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from array_api_compat import cupy as on_gpu

import collectives
from bench.gpu.__main__ import no_mpi
from collectives import Communicator
from parallel.optim.storage import TO_DEVICE, TO_HOST, Place
from tests.parallel.optim.test_offload import Make, check_predictions, places, serial, trained
from tests.parallel.training import ddp, zero1, zero2, zero3

pytestmark = pytest.mark.gpu
LAYOUTS = (
    "--mesh tensor=2 --sequence-parallel",
    "--mesh context=2",
    "--mesh pipe=2 --micro-batches 4",
)
CLOSE = {"float64": 1e-9, "float32": 1e-5, "float16": 1e-3}


@pytest.mark.skipif(no_mpi() is not None, reason="takes an MPI")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_strategy_over_mpi_trains_as_in_host_memory(num_ranks: int) -> None:
    """As in host memory: exact traffic and memory, equal parameters, the losses of one rank."""
    from tests.launch.test_strategies import run_every_strategy  # looks for an MPI

    run_every_strategy(num_ranks, "--device", "cuda")


@pytest.mark.skipif(no_mpi() is not None, reason="takes an MPI")
@pytest.mark.parametrize("words", LAYOUTS)
def test_layouts_over_mpi_train_as_in_host_memory(words: str, tmp_path: Path) -> None:
    """Traffic is as predicted, and losses are those of the host."""
    from tests.launch.test_layouts import EQUAL, train  # looks for an MPI

    _, wanted = train(2, words, tmp_path / "host.json")
    said, losses = train(2, f"{words} --device cuda", tmp_path / "device.json")
    assert EQUAL in said and "parameters: equal, to the bit" in said
    assert losses == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("make", "size"), [(serial, 1), (ddp, 3), (zero1, 3), (zero2, 3), (zero3, 3)]
)
def test_losses_are_those_of_the_host_wherever_updates_are_made(
    make: Make, size: int, dtype: str, tmp_path: Path
) -> None:
    """And what is kept and what crosses is what was predicted."""

    def check(comm: Communicator) -> None:
        _, wanted = trained(make, comm, dtype=dtype)
        for offload in places(tmp_path):
            strategy, losses = trained(make, comm, dtype=dtype, xp=on_gpu, offload=offload)
            np.testing.assert_allclose(losses, wanted, rtol=CLOSE[dtype])
            check_predictions(strategy)
            moved = strategy.offload.storage.moved
            crossed = moved[TO_HOST], moved[TO_DEVICE]
            assert all(crossed) is (offload is not Place)
            assert all(hasattr(x, "get") for x in strategy.parameters.values())

    collectives.run(check, size=size)
