"""A rank knows its number on its host, and uses a GPU by it; CuPy itself is not needed."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

import collectives
from collectives import Communicator, Topology
from collectives.arrays import gpus

HOSTS = Topology("abaab")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A CuPy of two GPUs; the numbers of those that were used."""
    numbers: list[int] = []

    def device(number: int) -> SimpleNamespace:
        return SimpleNamespace(use=lambda: numbers.append(number))

    runtime = SimpleNamespace(getDeviceCount=lambda: 2)
    cuda = SimpleNamespace(Device=device, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    gpus._say_who_uses_which.cache_clear()
    return numbers


def test_local_ranks_count_the_ranks_of_a_host() -> None:
    found = collectives.run(lambda comm: comm.local_rank, 5, topology=HOSTS)
    assert found == [0, 0, 1, 2, 1]


def test_ranks_use_the_gpus_of_their_host_in_turn(
    used: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """By their global numbers, ranks 1, 4 and 3 would use GPUs 1, 0 and 1."""

    def use_twice(comm: Communicator) -> tuple[int, int]:
        return comm.use_gpu(), comm.use_gpu()

    with caplog.at_level(logging.WARNING):
        found = collectives.run(use_twice, 5, topology=HOSTS)
    assert found == [(0, 0), (0, 0), (1, 1), (0, 0), (1, 1)]
    assert sorted(used) == [0] * 6 + [1] * 4
    assert sorted(caplog.messages) == [  # once for each host
        f"the ranks of this host use GPUs {numbers} of those that each sees, by their local ranks"
        for numbers in ("0, 1", "0, 1, 0")
    ]


def test_a_host_with_one_gpu_gets_no_message(
    used: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "getDeviceCount", lambda: 1)
    assert collectives.run(lambda comm: comm.use_gpu(), 3) == [0, 0, 0] == used
    assert not caplog.messages


def test_without_cupy_a_sentence_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="this rank can use no GPU: CuPy is not installed"):
        collectives.run(lambda comm: comm.use_gpu(), 1)
