"""A contender: one way to do the same work, which is timed beside others; and their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from bench.timing.attempt import Attempt, called
from bench.workloads.expected import Array

# Who is measured besides the algorithms.
PLAN, CALL = "plan", "call"  # ours, with the algorithm that is selected
NATIVE, MEMCPY, GLOO = "native", "memcpy", "gloo"  # others
THROUGH_HOST, NCCL = "get, MPI, set", "NCCL"  # others, of arrays on a device
RIVALS = (NATIVE, NCCL, THROUGH_HOST)
BOUND = "bound"  # the least exchange of messages that the collective needs
FRESH, NATIVE_FRESH = "fresh call", "fresh native"  # on arrays that no call has seen before
ASYNC, CHECKED = "async_op=True and wait", "checked call"  # other ways to make our call
# The drop-in's blocking, asynchronous and persistent all-reduce.
DROP_IN = "Allreduce"
DROP_IN_ASYNC = "Iallreduce and Wait"
DROP_IN_PERSISTENT = "Start and Wait"

WORKS = "works"  # of an MPI and arrays on a GPU
UNTRIED = "nobody has tried whether MPI works on arrays of a GPU; with -g a job of its own does"


class Contender(NamedTuple):
    """One way to do a case."""

    run: Callable[[], Any]
    free: Callable[[], None]
    result: Array | None  # where this rank finds its result, if it gets one
    attempt: Attempt = called  # how what may hang or fail is run


def nothing() -> None:
    """Do nothing: there is nothing to free."""
