"""Ranks stay in step: a test that fails on one rank fails on all, with that rank's report.

Without this a rank that failed walks on to the next test and meets its peers in the last one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator
from tests import hygiene
from tests.mpi.hygiene import MadeOverMpi

_agreement = MPI.COMM_WORLD.Dup()  # its messages meet nobody's

# Temporary directories of its own for each rank: pytest removes old ones while others list them.
_temporary = Path(tempfile.gettempdir()) / f"pytest-rank-{MPI.COMM_WORLD.rank}"
_temporary.mkdir(exist_ok=True)
os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_temporary)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Rank 0 reports for all; a launcher that promised another number of ranks is an error."""
    promised = int(os.environ.get("COLLECTIVES_TEST_RANKS", MPI.COMM_WORLD.size))
    if promised != MPI.COMM_WORLD.size:
        pytest.exit(f"started as {MPI.COMM_WORLD.size} ranks instead of {promised}", returncode=3)
    if MPI.COMM_WORLD.rank > 0:
        config.pluginmanager.unregister(name="terminalreporter")
    if not config.pluginmanager.is_registered(hygiene):
        config.pluginmanager.register(hygiene)
    hygiene.SOURCES.insert(0, MadeOverMpi(_agreement))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """No rank leaves before rank 0 has said everything: the first failing one may end the job."""
    sys.stdout.flush()
    _agreement.Barrier()


@pytest.fixture(scope="session")
def world() -> Communicator:
    """The library's communicator of all ranks."""
    return collectives.world()


@pytest.fixture(scope="session")
def mpi_world() -> MPI.Intracomm:
    """mpi4py's own communicator of all ranks."""
    return MPI.COMM_WORLD


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    yield from _agree(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from _agree(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield from _agree(item)


def _agree(item: pytest.Item) -> Iterator[Any]:
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - also pytest's own outcomes count
        failure = error
    if not _any_rank(failure is not None):  # nearly always, so that it should cost little
        return
    reports = _agreement.allgather(None if failure is None else _report(item, failure))
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report]
    if failed:
        pytest.fail("passed here, but not on every rank\n" + "\n".join(failed), pytrace=False)


def _any_rank(has_failed: bool) -> bool:
    """Whether this is so on any rank."""
    flag = np.array([has_failed], np.int32)
    _agreement.Allreduce(MPI.IN_PLACE, flag, MPI.MAX)
    return bool(flag[0])


def _report(item: pytest.Item, error: BaseException) -> str:
    info = pytest.ExceptionInfo.from_exception(error)
    return str(item.repr_failure(info))
