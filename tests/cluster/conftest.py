"""The clusters of the tests, each made once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.network import Cluster, cluster

MBIT = 400


@pytest.fixture(scope="session")
def four_hosts() -> Iterator[Cluster]:
    """Four hosts of one rank."""
    with cluster(4, 1, MBIT) as made:
        yield made


@pytest.fixture(scope="session")
def four_times_two() -> Iterator[Cluster]:
    """Four hosts of two ranks."""
    with cluster(4, 2, MBIT) as made:
        yield made


@pytest.fixture(scope="session")
def three_times_two() -> Iterator[Cluster]:
    """Three hosts of two ranks."""
    with cluster(3, 2, MBIT) as made:
        yield made
