"""Checked mode over MPI: every mistake is told to every rank, and the communicator is as it was."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator, NotFinite
from tests.scenarios.mismatches import MISTAKES, Mistake, make, noticed, still_works

pytestmark = pytest.mark.mpi


@pytest.fixture(params=[None, "thread"], ids=["alone", "with a thread"])
def checked(request: pytest.FixtureRequest) -> Communicator:
    return collectives.world(check=True, progress=request.param)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_every_rank_is_told_who_differs_in_what(checked: Communicator, mistake: Mistake) -> None:
    noticed(checked, mistake)


@pytest.fixture
def unchecked(mpi_world: MPI.Intracomm) -> Iterator[Communicator]:
    comm = collectives.wrap(mpi_world, check=False)
    yield comm
    comm.free()


@pytest.mark.parametrize(
    "mistake",
    [mistake for mistake in MISTAKES if mistake.alone == "silent"],
    ids=lambda mistake: mistake.name,
)
def test_without_checking_it_passes_in_silence(unchecked: Communicator, mistake: Mistake) -> None:
    with np.errstate(all="ignore"):  # bytes of one dtype taken for another may be anything
        make(unchecked, mistake)
    still_works(unchecked)


def test_a_mistake_in_what_is_under_way_is_told_by_its_wait(checked: Communicator) -> None:
    if checked.size == 1:
        return
    op = "max" if checked.rank == 0 else "min"
    works = [checked.all_reduce(np.array([i]), async_op=True) for i in range(4)]
    wrong = checked.all_reduce(np.ones(4), op, async_op=True)
    for i in np.random.default_rng(checked.rank).permutation(4):
        assert works[i].wait()[0] == i * checked.size
    with pytest.raises(collectives.CollectiveMismatch, match=r"all_reduce\(op=m"):
        wrong.wait()
    still_works(checked)


def test_a_time_limit_names_the_call_that_is_compared(checked: Communicator) -> None:
    sentences = []
    for _ in range(2 * (checked.size > 1)):  # the second goes straight to compiled code
        checked.barrier()
        x = np.ones(3)
        if checked.rank == 1:
            checked.recv(np.empty(3), 0)
        if checked.rank == 0:
            with pytest.raises(collectives.CollectiveTimeout, match="of its check") as error:
                checked.all_reduce(x, timeout=0.05)
            checked.send(x, 1)
            assert error.value.work.wait(timeout=30)[0] == checked.size
            sentences.append(str(error.value).splitlines()[0])
        else:
            checked.all_reduce(x)
    still_works(checked)
    numbers = [
        int(re.sub(r"all_reduce \(.*\), call (\d+): rank 0 waited.*", r"\1", sentence))
        for sentence in sentences
    ]
    assert not numbers or numbers[1] == numbers[0] + 2


def test_what_is_not_finite_is_told_to_every_rank() -> None:
    comm = collectives.world(check="finite")
    x = np.ones((2, 3), np.float32)
    assert comm.all_reduce(x)[0, 0] == comm.size
    if comm.rank == comm.size - 1:
        x[1, 0] = np.inf
    with pytest.raises(NotFinite, match=rf"^rank {comm.size - 1} brings inf at \[1, 0\] to scan"):
        comm.scan(x)
    still_works(comm)


def test_every_kind_of_checking_has_a_world_of_its_own(
    world: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, strict = collectives.world(check=True), collectives.world(check="finite")
    assert [comm.check for comm in (checked, strict)] == [True, "finite"]
    assert collectives.world(check=world.check) is world  # type: ignore[arg-type]
    monkeypatch.setenv("COLLECTIVES_CHECK", "1")
    assert collectives.world() is checked
    monkeypatch.setenv("COLLECTIVES_CHECK", "0")
    assert collectives.world() is collectives.world(check=False) is not checked
