"""While compiled code is being loaded, Python runs the programs, on some ranks or on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator
from collectives.engines import compiled
from tests.scenarios.sessions import SCENARIOS

pytestmark = pytest.mark.mpi


class Loading:
    """A thread that loads compiled code and is not done."""

    def is_alive(self) -> bool:
        return True


@pytest.fixture
def comm(mpi_world: MPI.Intracomm) -> Iterator[Communicator]:
    made = collectives.wrap(mpi_world)
    yield made
    made.free()


def run_by(comm: Communicator) -> str:
    return comm.explain("all_reduce", np.ones(3)).run_by


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_ranks_that_load_call_together_with_ranks_that_have_loaded(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, scenario: Callable[[Communicator], None]
) -> None:
    if comm.rank % 2 == 0:
        monkeypatch.setattr(compiled, "_loader", Loading())
        assert run_by(comm) == "the interpreter: compiled code is being loaded"
    scenario(comm)


def test_calls_and_plans_go_on_when_compiled_code_is_there(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, out = np.full(3, comm.rank), np.empty(3, int)
    with monkeypatch.context() as loading:
        loading.setattr(compiled, "_loader", Loading())
        plan = comm.plan.all_reduce(x, out=out)
        started = comm.all_reduce(x, async_op=True)
        sums = [comm.all_reduce(x)[0], plan.run()[0]]
        assert len(comm._session.pool) == 0
    assert run_by(comm) == "compiled code"
    sums += [comm.all_reduce(x)[0], plan.run()[0], started.wait()[0]]
    assert sums == [sum(range(comm.size))] * 5
    assert len(comm._session.pool) == 1 and comm._session.transport.max_wait > 0
