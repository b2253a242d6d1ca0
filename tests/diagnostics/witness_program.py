"""Run by test_witness.py: every algorithm's messages, as recorded and as MPI counted them.

Arguments: ways to compare calls in checked mode ("off", "on", "finite"), one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

import collectives
from collectives import Communicator
from tests.inside import transport_of
from tests.scenarios.jobs import all_jobs, perform
from tests.scenarios.sessions import (
    SCENARIOS,
    a_failure_belongs_to_the_call_that_failed,
    subgroups_may_overlap_in_time,
)

# Open MPI makes the communicator of a subgroup by messages that it counts as if they were ours; and
# a call is recorded when it begins, so one that fails half-way has not sent all that is recorded.
NOT_COMPARABLE = [subgroups_may_overlap_in_time, a_failure_belongs_to_the_call_that_failed]


class Unequal(Exception):  # noqa: N818
    """MPI counted other messages than the ledger recorded."""


@contextmanager
def witnessed(
    comm: Communicator, counters: collectives.diagnostics.mpi_counters.Counters
) -> Iterator[None]:
    """Compare messages and bytes to every destination, of everything sent inside."""
    before = np.array(counters.read())
    with comm.record() as ledger:
        yield
    observed = np.array(counters.read()) - before
    recorded = np.zeros_like(observed)
    for row in ledger.rows():
        recorded[:, row.dst] += (row.segments, row.bytes)
    if not np.array_equal(recorded, observed):
        raise Unequal(f"recorded {recorded.tolist()}, observed {observed.tolist()}")


MODES = {"off": False, "on": True, "finite": "finite"}


def check(comm: Communicator) -> None:
    """Compare all that a communicator sends."""
    counters = comm.counters()
    jobs = all_jobs(comm.size)
    if comm.check:  # which sends the same ahead of every call of an algorithm
        jobs = list({(job.collective, job.algorithm): job for job in jobs}.values())
    for job in jobs:
        with witnessed(comm, counters):
            perform(comm, job)
    for name in ("ring", "recursive_doubling", "two_shot"):  # cut into segments
        with witnessed(comm, counters):
            comm.all_reduce(np.ones(800_001), algorithm=name)
            comm.all_reduce(np.ones(800_001), algorithm=name, async_op=True).wait()
    for scenario in SCENARIOS:
        if scenario in NOT_COMPARABLE:
            continue
        with witnessed(comm, counters):
            scenario(comm)
    expect_unequal(comm, counters, lambda: collectives.wrap(transport_of(comm).comm).barrier())
    counters.close()


def expect_unequal(
    comm: Communicator,
    counters: collectives.diagnostics.mpi_counters.Counters,
    act: Callable[[], None],
) -> None:
    """A message that passes the ledger by is noticed."""
    try:
        with witnessed(comm, counters):
            act()
    except Unequal:
        return
    sys.exit("a message that was not recorded went unnoticed")


if __name__ == "__main__":
    for mode in sys.argv[1:]:
        check(collectives.world(check=MODES[mode]))
        print(f"equal where checking is {mode}")
