"""The exceptions of calls that fail between ranks; invalid arguments raise built-in ones."""

from __future__ import annotations

from typing import Any, TypeVar


class CollectiveError(RuntimeError):
    """A call failed because of an event between ranks.  The base class of the others.

    Attributes
    ----------
    is_on_all_ranks : bool
        Whether all ranks raise it, and no message of the call is under way.  If so, the
        communicator can still be used.
    """

    is_on_all_ranks = False


class CollectiveTimeout(CollectiveError):  # noqa: N818 - the name is part of the public face
    """A wait lasted longer than its time limit.

    The message names the call that waited, its round, and the ranks that it waits for.  If it names
    an earlier call, that call is still in progress, and the call that raised the error has not
    started.

    Attributes
    ----------
    work : Work or None
        The call in progress, which still uses its arrays.  ``error.work.wait()`` continues to wait,
        also for a blocking call.  A call that timed out while its header or counts were sent
        continues only in `work.wait()`, `work.test()` or the next collective call.  None if the
        call was to make a communicator (`split`, `subgroup`, `shrink`), which is abandoned, and if
        a device has waited too long: then the communicator has failed.
    """

    def __init__(self, message: str, work: Any = None) -> None:
        super().__init__(message)
        self.work = work


class CollectiveMismatch(CollectiveError):  # noqa: N818
    """The ranks made calls that do not match.

    In checked mode every rank raises it before anything of the call is sent, and the message says
    how the ranks differ.  Without checked mode, a rank raises it that receives a message of another
    length than expected.
    """


class NotFinite(CollectiveError):  # noqa: N818
    """The input of a rank or the result of a reduction has a NaN or an infinity.

    Only `check="finite"` raises it, on every rank.  The message names the rank, the value, and its
    index.
    """


class PeerFailed(CollectiveError):  # noqa: N818
    """Another rank has failed, so this call cannot complete.

    After it, only `shrink` and `free` can be called on the communicator.

    Attributes
    ----------
    ranks : tuple of int
        The ranks of the communicator that are known to have failed.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


Error = TypeVar("Error", bound=CollectiveError)


def on_all_ranks(error: Error) -> Error:
    """Return the error, marked as one that all ranks raise."""
    error.is_on_all_ranks = True
    return error
