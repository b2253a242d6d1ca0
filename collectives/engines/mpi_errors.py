"""What MPI's errors mean, and how messages are called off after one."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from mpi4py import MPI

from collectives.arrays import Bytes
from collectives.engines.transport import until
from collectives.errors import CollectiveMismatch

# Fault tolerance (ULFM) is a matter of how Open MPI was started; MPICH has none of it.
FAILURES = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED} - {MPI.ERR_UNKNOWN}

_PATIENCE = 0.1  # seconds that a message called off gets to be over


class Failed(NamedTuple):
    """A message and the error code with which MPI has ended it; or SUCCESS, or ERR_PENDING."""

    peer: int
    is_receive: bool
    code: int


def explained(error: MPI.Exception, rank: int, messages: Sequence[Failed]) -> BaseException:
    """What to raise for MPI's error: ours where a message was longer than its buffer.

    `messages`: those that were waited for.
    """
    if error.Get_error_class() not in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS):
        return error
    failed = [each for each in messages if each.code not in (MPI.SUCCESS, MPI.ERR_PENDING)]
    for each in failed:
        if (reason := MPI.Exception(each.code)).Get_error_class() in FAILURES:
            return reason
    mismatch = CollectiveMismatch(
        f"{_too_long(rank, failed)}: the ranks did not make the same call with the same sizes"
    )
    mismatch.__cause__ = error
    return mismatch


def _too_long(rank: int, failed: Sequence[Failed]) -> str:
    if not failed:
        return f"a message between rank {rank} and another was longer than expected"
    peer, is_receive, _ = failed[0]
    sender, receiver = (peer, rank) if is_receive else (rank, peer)
    return f"rank {sender} sent rank {receiver} a longer message than it expected"


def request_of(handle: Bytes) -> MPI.Request:
    """The request with this handle; whoever holds the handle owns it."""
    request = MPI.Request()
    ctypes.memmove(MPI._addressof(request), handle.ctypes.data, handle.size)
    return request


def called_off(requests: Sequence[MPI.Request], receives: Sequence[MPI.Request]) -> bool:
    """Call off the receives among the requests and let all go; whether all were over by then.

    A receive whose message has begun to come, and a send, can only be waited for.
    """
    for request in receives:
        if request and not request.Get_status():
            request.Cancel()
    deadline = time.monotonic() + _PATIENCE
    are_over = [until(partial(_is_over, request), deadline) for request in requests]
    for request in requests:
        if request:
            request.Free()
    return all(are_over)


def _is_over(request: MPI.Request) -> bool:
    """Whether the request is complete; one that MPI has ended with an error is over too."""
    return not request or bool(request.Get_status())
