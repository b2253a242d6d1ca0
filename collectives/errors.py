"""What can go wrong between ranks.  The caller's own mistakes are TypeError and ValueError."""

from __future__ import annotations

from typing import Any


class CollectiveError(RuntimeError):
    """Something went wrong between ranks: the call cannot complete as it was meant."""


class CollectiveTimeout(CollectiveError):  # noqa: N818 - the name is part of the public face
    """A wait outlasted its time limit.  Says which call, which round, and whom it waited for.

    The call is still under way and its buffers are in use; where it names an earlier call, that one
    is, and the one that raised it has not begun.  Nothing is lost: `work.wait()` of this
    error waits on, also where the call itself was a blocking one.  A call that
    timed out while its header or counts went ahead goes on only when `work` is waited for or
    tested, or at the next call; a plan or a message in between does not carry it along.  Only where
    a communicator was to be made (`split`, `subgroup`, `shrink`) is there no `work`, and the call
    is given up.
    """

    def __init__(self, message: str, work: Any = None) -> None:
        super().__init__(message)
        self.work = work


class CollectiveMismatch(CollectiveError):  # noqa: N818
    """The ranks did not call the same thing.

    In checked mode every rank raises it, before anything of the call is sent, and it says which
    rank differs in what.  Without, a message had another length than expected.
    """


class NotFinite(CollectiveError):  # noqa: N818
    """A rank brought NaN or an infinity, or a reduction made one; every rank raises it."""


class PeerFailed(CollectiveError):  # noqa: N818
    """Another rank failed, so this call can never complete.

    `ranks`: those of the communicator that have failed, as far as that is known.  No more can be
    called on it but `shrink`, which makes a communicator of the others where MPI is fault-tolerant.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
