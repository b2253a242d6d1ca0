"""What can go wrong between ranks.  The caller's own mistakes are TypeError and ValueError."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """Something went wrong between ranks; the communicator can no longer be used."""


class CollectiveTimeout(CollectiveError):  # noqa: N818 - the name is part of the public face
    """A wait outlasted its time limit.  Says which call, which round, and whom it waited for."""


class CollectiveMismatch(CollectiveError):  # noqa: N818
    """The ranks did not call the same thing: a message had another length than expected."""


class PeerFailed(CollectiveError):  # noqa: N818
    """Another rank failed, so this one can never finish."""
