"""Executions are made once for calls of the same kind, and run again on other arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives.engines.threads import ThreadTransport
from collectives.runtime import pool

P = 3


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that have made an execution, one after the other."""
    ranks: list[int] = []
    right = ThreadTransport.execution

    def execution(self: ThreadTransport, *args: Any) -> Any:
        ranks.append(self.rank)
        return right(self, *args)

    monkeypatch.setattr(ThreadTransport, "execution", execution)
    return ranks


def test_calls_of_one_kind_share_an_execution(made: list[int]) -> None:
    def body(comm: Communicator) -> None:
        for step in range(5):
            x = np.full(4, step + comm.rank)  # another array every time
            assert comm.all_reduce(x)[0] == P * step + sum(range(P))
            right, left = (comm.rank + 1) % P, (comm.rank - 1) % P
            assert comm.send_recv(x, right, left)[0] == step + left

    collectives.run(body, P)
    assert sorted(made) == [rank for rank in range(P) for _ in ("all_reduce", "send_recv")]


def test_calls_under_way_have_executions_of_their_own(made: list[int]) -> None:
    def body(comm: Communicator) -> None:
        for _ in range(2):
            works = [comm.all_reduce(np.full(4, n), async_op=True) for n in range(3)]
            assert [work.wait()[0] for work in works[::-1]] == [6, 3, 0]

    collectives.run(body, P)
    assert all(made.count(rank) <= 3 for rank in range(P))  # fewer if one is over by the next


def test_the_number_of_executions_that_are_kept_is_bounded(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_MAX_KINDS", 2)

    def body(comm: Communicator) -> None:
        for size in (1, 2, 3, 1):  # at the third, the first two are forgotten
            comm.all_reduce(np.ones(size))

    collectives.run(body, P)
    assert sorted(made) == [rank for rank in range(P) for _ in range(4)]
