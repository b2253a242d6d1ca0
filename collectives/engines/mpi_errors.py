"""Translates MPI's errors, and cancels messages after one."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from mpi4py import MPI

from collectives.arrays import Bytes
from collectives.engines.transport import poll_until
from collectives.errors import CollectiveError, CollectiveMismatch

# Only an Open MPI that was started with fault tolerance (ULFM) has these errors.
FAILURES = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED} - {MPI.ERR_UNKNOWN}

_CANCEL_SECONDS = 0.1  # seconds that cancelled messages have to complete


class Failed(NamedTuple):
    """A message and its error code, which may also be SUCCESS or ERR_PENDING."""

    peer: int
    is_receive: bool
    code: int


def translate_message_error(
    error: MPI.Exception, rank: int, messages: Sequence[Failed]
) -> BaseException:
    """Return the error to raise for MPI's: a CollectiveMismatch if a message exceeded its buffer.

    If a message failed for another reason, it is a CollectiveError that names the other rank, which
    may have died: MPICH has no error class for that.  The failed call waited for `messages`.
    """
    if error.Get_error_class() not in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS):
        return error
    failed = [message for message in messages if message.code not in (MPI.SUCCESS, MPI.ERR_PENDING)]
    reasons = [MPI.Exception(message.code) for message in failed]
    for reason in reasons:
        if reason.Get_error_class() in FAILURES:
            return reason
    for message, reason in zip(failed, reasons, strict=True):
        if reason.Get_error_class() != MPI.ERR_TRUNCATE:
            return _caused_by(error, CollectiveError(_broken(rank, message, reason)))
    return _caused_by(
        error,
        CollectiveMismatch(
            f"{_too_long(rank, failed)}: the ranks did not make the same call with the same sizes"
        ),
    )


def _caused_by(cause: MPI.Exception, error: CollectiveError) -> CollectiveError:
    error.__cause__ = cause
    return error


def _broken(rank: int, message: Failed, reason: MPI.Exception) -> str:
    sender, receiver = _ends(rank, message)
    what = f"the message from rank {sender} to rank {receiver} failed"
    text = " ".join(reason.Get_error_string().split())
    return f"{what}; rank {message.peer} may have died (MPI says: {text})"


def _too_long(rank: int, failed: Sequence[Failed]) -> str:
    if not failed:
        return f"a message between rank {rank} and another was longer than expected"
    sender, receiver = _ends(rank, failed[0])
    return f"rank {sender} sent rank {receiver} a longer message than it expected"


def _ends(rank: int, message: Failed) -> tuple[int, int]:
    """Return the sender and the receiver of a message of `rank`."""
    return (message.peer, rank) if message.is_receive else (rank, message.peer)


def request_of(handle: Bytes) -> MPI.Request:
    """Return a request object for a handle, which stays the property of the caller."""
    request = MPI.Request()
    ctypes.memmove(MPI._addressof(request), handle.ctypes.data, handle.size)
    return request


def cancel_all(requests: Sequence[MPI.Request], receives: Sequence[MPI.Request]) -> bool:
    """Cancel the receives, wait shortly for all requests, and free them.

    Return whether all were complete.  A send, and a receive whose message has started to arrive,
    cannot be cancelled.
    """
    for request in receives:
        if not is_complete(request):
            request.Cancel()
    deadline = time.monotonic() + _CANCEL_SECONDS
    are_done = [poll_until(partial(is_complete, request), deadline) for request in requests]
    for request in requests:
        if request:
            request.Free()
    return all(are_done)


def is_complete(request: MPI.Request) -> bool:
    """Return whether the request is complete or has failed.

    `Test` would free a complete request, whose status the next wait needs.
    """
    try:
        return not request or bool(request.Get_status())
    except MPI.Exception:  # the next wait raises it
        return True
