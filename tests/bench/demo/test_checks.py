"""The demo's checks notice what they are there to notice."""

from __future__ import annotations

import math

import pytest

from bench.demo import checks

LOSSES = [5.5, 4.0, 3.0]
TRAFFIC = {"traffic": {"matrix": [[0, 7], [7, 0]], "not_observed": None}}


def equality(ours: list[float], dtype: str = "float64") -> bool:
    return checks.equality(dtype, ours, LOSSES, steps=3).is_good


def test_equal_losses_pass():
    assert equality(LOSSES)
    assert equality([5.5, 4.0 * (1 + 1e-10), 3.0])
    assert equality([5.5, 4.0 * (1 + 1e-6), 3.0], "float32")


@pytest.mark.parametrize("loss", [4.0 * (1 + 1e-8), 4.0 * (1 - 1e-8), math.nan, math.inf])
def test_one_unequal_loss_fails(loss):
    assert not equality([5.5, loss, 3.0])


@pytest.mark.parametrize("losses", [[], LOSSES[:2], [*LOSSES, 2.0]])
def test_missing_losses_fail(losses):
    assert not equality(losses)
    assert not checks.equality("float64", losses, losses, steps=3).is_good


def test_a_failed_job_fails():
    result = {"summary": [{"best_ratio": 2.0}], "geometric_mean": {"best": 2.0}, "mpi": "MPI 1"}
    assert checks.bandwidth(0, result).is_good
    assert not checks.bandwidth(1, result).is_good
    assert not checks.bandwidth(0, {}).is_good
    assert not checks.traffic(1, TRAFFIC, is_watched=True).is_good
    assert checks.jobs({"bandwidth": 0, "ddp float32": 0}).is_good
    assert not checks.jobs({"bandwidth": 0, "ddp float32": 1}).is_good


def test_a_missing_column_fails_where_mpi_could_have_counted():
    unseen = {"traffic": TRAFFIC["traffic"] | {"not_observed": "no counters"}}
    assert checks.traffic(0, TRAFFIC, is_watched=True).is_good
    assert checks.traffic(0, unseen, is_watched=False).is_good
    assert not checks.traffic(0, unseen, is_watched=True).is_good


def test_a_model_that_learned_nothing_fails():
    assert checks.learning({"losses": [5.5, 2.0], "unigram_entropy": 3.2}).is_good
    assert not checks.learning({"losses": [5.5, 3.3], "unigram_entropy": 3.2}).is_good
    assert not checks.learning({}).is_good
