"""An all-to-all in which every rank knows only its own counts, `SentReceived`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import CollectiveError, CollectiveMismatch, Communicator, SentReceived, algorithms
from collectives.communicator.calls import _typed
from collectives.programs import passing_blocks, placement, program
from collectives.schedule import trees
from collectives.schedule.contracts import SPECS
from collectives.selection.labels import parse_label
from tests.algorithms.registry import registry_as_it_was
from tests.fakes.device import on_device, on_host
from tests.scenarios.mismatches import still_works
from tests.scenarios.sessions import (
    counts_travel_ahead_of_blocks_that_are_sent_on,
    own_counts_are_enough,
)

P = 3
X = np.arange(6.0)
EVEN = SentReceived([2] * P, [2] * P)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.slow
def test_own_counts_give_the_result_of_a_table(size: int, check: bool) -> None:
    collectives.run(own_counts_are_enough, size, timeout=60, check=check)
    collectives.run(counts_travel_ahead_of_blocks_that_are_sent_on, size, timeout=60, check=check)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.slow
def test_own_counts_serve_device_arrays(size: int) -> None:
    def body(comm: Communicator) -> None:
        own_counts_are_enough(comm, on_device, on_host)
        counts_travel_ahead_of_blocks_that_are_sent_on(comm, on_device, on_host)

    collectives.run(body, size, timeout=60)


def test_rows_may_all_go_to_one_rank_or_nowhere() -> None:
    def body(comm: Communicator, num_rows: int) -> Any:
        is_first = comm.rank == 0
        counts = SentReceived([num_rows, 0, 0], [num_rows * is_first] * P)
        return comm.all_to_all(np.full(num_rows, comm.rank), counts=counts).tolist()

    for num_rows in (0, 2):
        got = collectives.run(lambda comm, n=num_rows: body(comm, n), P, timeout=20)
        assert got == [np.repeat(range(P), num_rows).tolist(), [], []]


@pytest.mark.parametrize("collective", ["gather", "scatter", "all_to_all"])
def test_an_algorithm_is_local_if_ranks_handle_only_their_own_blocks(collective: str) -> None:
    for name in algorithms.names(collective):
        entry = algorithms.info(collective, name)
        assert entry.is_local == all(handles_own_blocks(entry, rank, 8) for rank in range(1, 8))


def handles_own_blocks(entry: algorithms.Algorithm, rank: int, size: int) -> bool:
    """Whether a rank, which is not the root, sends and receives only blocks of its own."""
    root = 0 if SPECS[entry.collective].is_rooted else None
    operations = [op for each in entry.schedule(rank, size, root) for op in each]
    blocks = [block for op in operations for block in op.blocks]
    return all(rank in (block if isinstance(block, tuple) else (block,)) for block in blocks)


# What is refused


def with_counts(sent: Any, received: Any, **how: Any) -> Callable[[Communicator], Any]:
    return lambda comm: comm.all_to_all(X, counts=SentReceived(sent, received), **how)


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Communicator], Any]]] = {
    "too few sent": (
        ValueError,
        "counts.sent has 2 entries for 3 ranks",
        with_counts([3, 3], [2] * P),
    ),
    "too many received": (
        ValueError,
        "counts.received has 4 entries for 3 ranks",
        with_counts([2] * P, [2] * 4),
    ),
    "negative sent": (ValueError, "sent has a negative", with_counts([-2, 4, 4], [2] * P)),
    "negative received": (ValueError, "received has a negative", with_counts([2] * P, [-2] * P)),
    "a sum that is not the rows": (
        ValueError,
        "counts.sent add up to 3 rows, the array has 6",
        with_counts([1] * P, [1] * P),
    ),
    "floats": (TypeError, "an entry of counts.received must be", with_counts([2] * P, [2.0] * P)),
    "numbers": (TypeError, "counts.sent must be a sequence of 3", with_counts(6, 6)),
    "two answers for a rank's own rows": (
        ValueError,
        r"rank \d sends itself 2 rows by counts.sent, and 3 by counts.received",
        with_counts([2] * P, [3] * P),
    ),
    "out of other rows": (
        ValueError,
        r"out has shape \(5,\), the result has \(6,\)",
        with_counts(*EVEN, out=np.empty(5)),
    ),
    "out of another dtype": (
        TypeError,
        "out has dtype",
        with_counts(*EVEN, out=np.empty(6, np.float32)),
    ),
    "a wrong number of ranks": (
        ValueError,
        "by torus serves",
        with_counts(*EVEN, algorithm="torus"),
    ),
    "an unknown algorithm": (
        ValueError,
        "unknown algorithm",
        with_counts(*EVEN, algorithm="magic"),
    ),
    "a plan of a wrong number of ranks": (
        ValueError,
        "by torus serves",
        lambda comm: comm.plan.all_to_all(X, counts=EVEN, algorithm="torus"),
    ),
    "an all-gather": (TypeError, "an entry of counts", lambda c: c.all_gather(X, counts=EVEN)),
    "a gather": (TypeError, "an entry of counts", lambda c: c.gather(X, counts=EVEN)),
}


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("what", REFUSED)
def test_wrong_input_is_refused_before_anything_is_sent(what: str, check: bool) -> None:
    error, sentence, call = REFUSED[what]

    def body(comm: Communicator) -> None:
        with comm.record() as ledger, pytest.raises(error, match=sentence):
            call(comm)
        assert ledger.rows() == []
        still_works(comm)

    collectives.run(body, P, timeout=20, check=check)


def test_a_preferred_algorithm_sends_its_counts_ahead_too() -> None:
    def body(comm: Communicator) -> None:
        with collectives.using(all_to_all="bruck"), comm.record() as ledger:
            comm.all_to_all(X, counts=EVEN)
            comm.all_to_all(X, counts=[2] * P)
        assert {(row.collective, row.algorithm) for row in ledger.rows()} == {
            ("counts", "bruck"),
            ("all_to_all", "bruck"),
        }
        with collectives.using(all_to_all="pairwise"), comm.record() as ledger:
            comm.all_to_all(X, counts=EVEN)
        assert {row.algorithm for row in ledger.rows()} == {"pairwise"}

    collectives.run(body, P, timeout=20, check=False)


def test_an_algorithm_with_segments_is_refused() -> None:
    refused = with_counts(*EVEN, algorithm="segmented_linear")
    with pytest.raises(ValueError, match="all_to_all by segmented_linear needs the counts of all"):
        collectives.run(refused, P, timeout=20)


def test_a_registered_algorithm_is_refused() -> None:
    linear = algorithms.info("all_to_all", "linear").function
    refused = with_counts(*EVEN, algorithm="linear_of_mine")
    sentence = (
        "all_to_all by linear_of_mine needs the counts of all ranks; .* linear_sync, linear, "
        "pairwise, one_factor, bruck, "
    )
    with registry_as_it_was():
        algorithms.register("all_to_all", name="linear_of_mine")(linear)
        with pytest.raises(ValueError, match=sentence):
            collectives.run(refused, P, timeout=20)


# Ranks that disagree


def disagreeing(comm: Communicator) -> SentReceived:
    """Rank 2 expects 3 rows from rank 1, which sends 2."""
    return EVEN._replace(received=[2, 3, 2]) if comm.rank == 2 else EVEN


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.all_to_all(X, counts=disagreeing(comm)),
        lambda comm: comm.all_to_all(X, counts=disagreeing(comm), async_op=True).wait(),
        lambda comm: comm.plan.all_to_all(X, counts=disagreeing(comm)),
    ],
    ids=["blocking", "async_op", "plan"],
)
def test_checked_mode_tells_all_ranks_of_counts_that_disagree(
    call: Callable[[Communicator], Any],
) -> None:
    told = "all_to_all: rank 1 sends 2 rows to rank 2, which expects 3"

    def body(comm: Communicator) -> None:
        with comm.record() as ledger, pytest.raises(CollectiveMismatch, match=told):
            call(comm)
        assert "all_to_all" not in {row.collective for row in ledger.rows()}
        still_works(comm)

    collectives.run(body, P, timeout=20, check=True)


def test_checked_mode_compares_it_with_other_forms_of_counts() -> None:
    def body(comm: Communicator) -> None:
        counts: Any = [2] * P if comm.rank == 0 else EVEN
        with pytest.raises(CollectiveMismatch, match="counts=sent and received"):
            comm.all_to_all(X, counts=counts)
        still_works(comm)

    collectives.run(body, P, timeout=20, check=True)


def test_counts_that_travelled_ahead_tell_too() -> None:
    def body(comm: Communicator) -> None:
        try:
            comm.all_to_all(X, counts=disagreeing(comm), algorithm="bruck")
        except CollectiveMismatch:
            with pytest.raises(CollectiveError, match="is unusable"):
                comm.barrier()
            raise

    told = "all_to_all: rank 1 sends 2 rows to rank 2, which expects 3"
    with pytest.raises(CollectiveMismatch, match=told):
        collectives.run(body, P, timeout=20, check=False)


def test_a_rank_learns_only_the_counts_of_blocks_that_it_holds() -> None:
    for size, label in product((1, 2, 3, 7, 8, 64), ("bruck", "bruck(radix=4)")):
        found = parse_label("all_to_all", label)
        options = tuple(found.options.items())
        for rank in range(size):
            passing = passing_blocks(found.algorithm, rank, size, options)
            assert all(rank not in pair for pair in passing)
            # Every block that a rank sends is its own, or has passed through it.
            num_sent = trees.num_hops(size, found.options.get("radix", 2))
            assert len(passing) == num_sent - (size - 1)


def test_a_count_that_gets_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = placement.passing_blocks
    monkeypatch.setattr(placement, "passing_blocks", lambda *each: right(*each)[::-1])
    program._compiled.cache_clear()
    with pytest.raises((AssertionError, CollectiveMismatch)):
        collectives.run(counts_travel_ahead_of_blocks_that_are_sent_on, 8, timeout=20, check=False)
    program._compiled.cache_clear()


def test_without_checked_mode_the_length_of_a_message_tells() -> None:
    with pytest.raises(CollectiveMismatch, match="the same call with the same sizes"):
        collectives.run(
            lambda comm: comm.all_to_all(X, counts=disagreeing(comm)), P, timeout=20, check=False
        )


# The cache


def test_the_key_of_a_call_tells_it_from_a_table_of_equal_numbers() -> None:
    table = [[1, 2], [1, 3]]
    assert _typed(SentReceived(*table)) != _typed(table) == _typed(tuple(table))
    assert _typed(SentReceived(*table)) == _typed(SentReceived(*map(tuple, table)))
