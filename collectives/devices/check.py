"""The comparison of checked mode before a call on devices: by the records of the ranks.

Ranks with arrays on devices publish a digest of the call in their records, and send nothing.  Each
rank also notes, in the memory that the host shares, how it makes its n-th comparison: by messages,
because it has an array on the host or exchanges a header first, or by the record of which call.  If
that differs, all ranks compare by messages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from zlib import crc32

from collectives.devices.meeting import Wait, Waits
from collectives.diagnostics import Waiting
from collectives.engines import MESSAGES, Board, CallKey, Execution
from collectives.errors import CollectiveError


class Check:
    """The comparison of one call on one rank.

    Parameters
    ----------
    board : Board
        The memory in which the ranks show their comparisons.
    digest : bytes
        The digest of the call.
    number : int
        The number of the comparison.
    messages : function
        Yields the executions of the comparison by messages, each of which ends before the next one
        is asked for.  The generator keeps the memory of an execution that does not end.

    Attributes
    ----------
    has_refused : bool
        Whether the comparison by messages has refused the call.
    """

    has_refused = False

    def __init__(
        self,
        board: Board,
        digest: bytes,
        number: int,
        messages: Callable[[], Generator[Execution, None, None]],
    ) -> None:
        self._board, self.digest, self.number = board, digest, number
        self._messages, self._has_compared = messages(), False
        self._under_way: Execution | None = None

    def begin(self, key: CallKey) -> None:
        """Let the other ranks see which record this rank publishes."""
        self._board.note_check(self.number, MESSAGES + 1 + crc32(repr(key).encode()) % 2**31)

    def is_wanted(self, ranks: Iterable[int]) -> bool:
        """Return whether one of these ranks compares by messages, or another call."""
        if self._has_compared:
            return False
        return any(self._board.differs_in_check(rank, self.number) for rank in ranks)

    def compare(self) -> Waits:
        """Compare by messages.  Raises CollectiveMismatch if the calls of the ranks differ."""
        self._has_compared = True
        try:
            for execution in self._messages:
                self._under_way = execution
                while not execution.advance(0.0):
                    yield None
                self._under_way = None
        except CollectiveError as error:
            self.has_refused = error.is_on_all_ranks
            raise

    def compare_once(self) -> Waits:
        """Compare by messages, unless that was done."""
        if not self._has_compared:
            yield from self.compare()

    @property
    def row(self) -> int:
        """The row of the comparison by messages that is next, to notice progress."""
        under_way = self._under_way
        return -1 if under_way is None else under_way.row

    def note_completed(self) -> None:
        """See `Execution.note_completed`."""
        if (under_way := self._under_way) is not None:
            under_way.note_completed()

    def waiting_for(self) -> list[Waiting]:
        """Return the messages of the comparison that are not known to be complete."""
        under_way = self._under_way
        return [] if under_way is None else under_way.position()[1]

    def abandon(self) -> None:
        """End the comparison by messages."""
        self._messages.close()


def until(wait: Wait, check: Check | None) -> Waits:
    """Wait; meanwhile compare by messages if a rank that is missing does something else."""

    def is_wanted() -> bool:
        return check is not None and check.is_wanted(wait.missing())

    yield Wait(lambda: wait.is_over() or is_wanted(), wait.missing)
    if check is not None and is_wanted():
        yield from check.compare()
        yield wait
