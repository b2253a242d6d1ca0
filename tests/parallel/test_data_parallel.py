"""Data parallelism, on threads as ranks: the losses of one rank, and just the traffic it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import text
from parallel.data import DataParallel, Serial
from parallel.nn import Model, byte_model
from parallel.traffic import Tally, TrafficMismatch, TrafficTable

STEPS, BATCH, CONTEXT = 6, 11, 4
DATA = text.load(__file__)

Rogue = Callable[[Communicator], object]


class Run(NamedTuple):
    """What one rank brings home; `table` on rank 0 only."""

    losses: list[float]
    parameters: dict[str, Any]
    table: TrafficTable | None


def model(dtype: str = "float64", seed: int = 0) -> Model:
    return byte_model(context=CONTEXT, dim=3, hidden=8, dtype=dtype, seed=seed)


def train(strategy: Serial, rank: int, ranks: int) -> list[float]:
    strategy.start()
    where = {"seed": 0, "size": BATCH, "context": CONTEXT, "rank": rank, "ranks": ranks}
    return [
        strategy.step(*text.batch(DATA, step=step, **where), BATCH) for step in range(STEPS)
    ]  # fmt: skip


def serial(dtype: str = "float64") -> list[float]:
    return train(Serial(model(dtype)), 0, 1)


def parallel(
    ranks: int, *, dtype: str = "float64", algorithm: str = "ring", rogue: Rogue = lambda comm: None
) -> list[Run]:
    def fn(comm: Communicator) -> Run:
        # Other ranks begin from other values: what rank 0 broadcasts is what counts.
        strategy = DataParallel(comm, model(dtype, seed=comm.rank), algorithm=algorithm)
        with comm.record() as ledger:
            losses = train(strategy, comm.rank, comm.size)
            rogue(comm)
        whole = ledger.gather()
        calls = strategy.traffic(STEPS)
        table = None if whole is None else TrafficTable(calls, whole, None, size=comm.size)
        return Run(losses, strategy.model.parameters(), table)

    results: list[Run] = collectives.run(fn, size=ranks)
    return results


def table_of(runs: Sequence[Run]) -> TrafficTable:
    assert runs[0].table is not None
    return runs[0].table


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-12), ("float32", 1e-5)])
def test_losses_are_those_of_one_rank(ranks: int, dtype: str, close: float) -> None:
    """11 rows on 2, 3, 4 and 5 ranks: every division is uneven."""
    for run in parallel(ranks, dtype=dtype):
        np.testing.assert_allclose(run.losses, serial(dtype), rtol=close)


def test_unweighted_means_would_be_noticed() -> None:
    """The negative control: 4 ranks that each average over their own rows are not equal."""

    class Unweighted(DataParallel):
        def step(self, inputs: Any, targets: Any, total: int) -> float:
            return super().step(inputs, targets, len(inputs) * self.comm.size)

    def fn(comm: Communicator) -> list[float]:
        return train(Unweighted(comm, model()), comm.rank, comm.size)

    assert not np.allclose(collectives.run(fn, size=4)[0], serial(), rtol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_hold_the_same_parameters_to_the_last_bit(ranks: int) -> None:
    first, *others = parallel(ranks)
    for other in others:
        for name, value in first.parameters.items():
            np.testing.assert_array_equal(value, other.parameters[name])


def test_a_run_repeats_to_the_last_bit() -> None:
    assert parallel(3)[0].losses == parallel(3)[0].losses


SERVED = [
    (ranks, name)
    for ranks in (1, 2, 3, 4, 5)
    for name in collectives.algorithms.names("all_reduce")
    if collectives.algorithms.info("all_reduce", name).serves(ranks)
]


@pytest.mark.parametrize(("ranks", "algorithm"), SERVED)
def test_predicted_is_recorded(ranks: int, algorithm: str) -> None:
    table = table_of(parallel(ranks, algorithm=algorithm))
    assert "two columns compared" in table.check()


def test_the_rows_are_the_docstrings() -> None:
    table = table_of(parallel(4))
    layers = model().flat_parameters
    volumes = {(row.phase, row.collective): row.recorded for row in table.rows}
    nbytes = {name: flat.nbytes for name, flat in layers.items()}
    wanted = {("start", "broadcast"): Tally(4, 4 * 3, 3 * sum(nbytes.values()))}
    wanted |= {
        (f"backward/{name}", "all_reduce"): Tally(STEPS, STEPS * 24, STEPS * 6 * n)
        for name, n in nbytes.items()
    }
    wanted[("loss", "all_reduce")] = Tally(STEPS, STEPS * 24, STEPS * 6 * 8)
    assert volumes == wanted
    assert table.matrix.sum() == sum(tally.bytes for tally in wanted.values())


def one_message(comm: Communicator, nbytes: int) -> None:
    """Rank 0 to rank 1."""
    if comm.rank == 0:
        comm.send(np.zeros(nbytes, np.uint8), 1)
    if comm.rank == 1:
        comm.recv(np.zeros(nbytes, np.uint8), 0)


def outside(comm: Communicator) -> None:
    one_message(comm, 1)


def in_a_phase(comm: Communicator) -> None:
    with collectives.phase("loss"):
        one_message(comm, 8)


def an_extra_call(comm: Communicator) -> None:
    with collectives.phase("loss"):
        comm.all_reduce(np.zeros(1), algorithm="ring")


@pytest.mark.parametrize("rogue", [outside, in_a_phase, an_extra_call])
def test_a_rogue_message_is_noticed(rogue: Rogue) -> None:
    with pytest.raises(TrafficMismatch, match=r"loss|outside every phase"):
        table_of(parallel(3, rogue=rogue)).check()
