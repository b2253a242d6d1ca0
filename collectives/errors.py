"""The exceptions of calls that fail between ranks; wrong arguments raise TypeError, ValueError."""

from __future__ import annotations

from typing import Any


class CollectiveError(RuntimeError):
    """A call cannot complete because of what happened between ranks.  The base of the others."""


class CollectiveTimeout(CollectiveError):  # noqa: N818 - the name is part of the public face
    """A wait lasted longer than its time limit.

    The message says which call waited in which round, and for which ranks.  If it names an earlier
    call, that call is still under way, and the one that raised the error has not begun.

    `work` is the call that is under way; its arrays are in use.  `error.work.wait()` waits on, for
    blocking calls too.  A call that timed out while its header or counts were sent goes on only in
    `work.wait()`, `work.test()` or the next collective call.  `work` is None where a communicator
    was to be made (`split`, `subgroup`, `shrink`): then the call is given up.
    """

    def __init__(self, message: str, work: Any = None) -> None:
        super().__init__(message)
        self.work = work


class CollectiveMismatch(CollectiveError):  # noqa: N818
    """The ranks made calls that do not belong together.

    In checked mode every rank raises it before anything of the call is sent, and the message says
    which rank differs in what.  Without checked mode it is raised by a rank that receives a message
    of another length than expected.
    """


class NotFinite(CollectiveError):  # noqa: N818
    """A rank brought NaN or an infinity, or a reduction made one; with `check="finite"` only.

    Every rank raises it, and the message says which rank, which value, and where.
    """


class PeerFailed(CollectiveError):  # noqa: N818
    """Another rank has failed, so that this call can never complete.

    `ranks`: the ranks of the communicator that are known to have failed.  Nothing but `shrink` and
    `free` can be called on the communicator after it.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
