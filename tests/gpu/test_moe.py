"""Mixtures of experts on a GPU: what the host computes, and training over MPI."""

from __future__ import annotations

from pathlib import Path

import cupy
import numpy as np
import pytest
from array_api_compat import cupy as on_gpu

from bench.gpu.__main__ import no_mpi
from moe.gates import GATES
from tests.moe.experts import Setup
from tests.moe.layers.test_on_device import FORMS, run, setup_of

pytestmark = pytest.mark.gpu


def check(setup: Setup) -> None:
    for rank in run(setup, on_gpu, cupy.asnumpy):
        for there, here in zip(rank.there, rank.here, strict=True):
            np.testing.assert_allclose(there, here, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_dispatch_keeps_tokens_on_the_gpu(form: str) -> None:
    check(setup_of(form))


@pytest.mark.parametrize("name", GATES)
def test_every_gate_keeps_tokens_on_the_gpu(name: str) -> None:
    check(Setup(name, size=2, dim=64))


@pytest.mark.skipif(no_mpi() is not None, reason="takes an MPI")
@pytest.mark.parametrize("dispatch", ["", "--dispatch hierarchical --ranks-per-host 1"])
def test_training_over_mpi_has_the_losses_of_the_host(dispatch: str, tmp_path: Path) -> None:
    """Traffic and memory are as predicted, and losses those of the host."""
    from tests.launch.test_layouts import train  # looks for an MPI

    words = f"--mesh expert=2 --moe stable --experts 4 {dispatch}"
    _, wanted = train(2, words, tmp_path / "host.json")
    said, losses = train(2, f"{words} --device cuda", tmp_path / "device.json")
    assert "predicted = recorded" in said
    assert losses == pytest.approx(wanted, rel=1e-9)
