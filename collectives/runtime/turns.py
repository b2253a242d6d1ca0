"""The numbers of calls, and the tags that keep the messages of different calls apart.

MPI's tags are divided into four quarters:

0. the user's own, of `send` and `recv`;
1. of collectives that do not block and of plans, by the number of the call;
2. of what the library sends ahead of such a call, by the same number;
3. one tag for all blocking collectives, one for `meet`, and the rest for what the ranks tell each
   other in checked mode, in the order in which calls start.

All blocking calls can have one tag, so that their executions can be kept: on every rank they run
one after the other, and between two ranks messages of one tag arrive in the order in which they
were sent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import validation


class NotYourTurn(RuntimeError):  # noqa: N818
    """Another thread, or what a signal interrupted, makes a call on this communicator."""

    def __init__(self) -> None:
        super().__init__(
            "another call is being made on this communicator; threads that call collectives at "
            "the same time need a communicator each"
        )


class Numbering:
    """How many calls a communicator has made, and the tags that follow from that.

    `num_calls_made`, `num_checks_made`: arrays of one number, which compiled code counts up too.
    """

    def __init__(self, num_tags: int) -> None:
        self._quarter = num_tags // 4
        self.num_calls_made: NDArray[np.int64] = np.zeros(1, np.int64)
        self.num_checks_made: NDArray[np.int64] = np.zeros(1, np.int64)
        self.blocking_tag = 3 * self._quarter
        self.meeting_tag = 3 * self._quarter + 1
        self.check_tags = range(3 * self._quarter + 2, 4 * self._quarter)
        self.async_tags = range(self._quarter, 2 * self._quarter)

    @property
    def num_calls(self) -> int:
        """How many calls there have been."""
        return int(self.num_calls_made[0])

    def next_number(self) -> int:
        """The number of a new call."""
        self.num_calls_made[0] += 1
        return int(self.num_calls_made[0])

    def catch_up(self, num_calls: int) -> None:
        """Another rank has made so many calls: the ranks have called different things."""
        self.num_calls_made[0] = max(self.num_calls, num_calls)

    def async_tag(self, number: int) -> int:
        """The tag of a call of this number that does not block, and of all runs of a plan."""
        return self.async_tags[number % self._quarter]

    def header_tag(self, number: int) -> int:
        """The tag of what the library sends ahead of the call of this number."""
        return 2 * self._quarter + number % self._quarter

    def next_check_tag(self) -> int:
        """The tag of the next comparison in checked mode."""
        self.num_checks_made[0] += 1
        return self.check_tags[int(self.num_checks_made[0]) % len(self.check_tags)]

    def user_tag(self, tag: object) -> int:
        """A tag that the user names.  Raises TypeError or ValueError if it cannot be one."""
        number, largest = validation.integer(tag, "tag"), self._quarter - 1
        if not 0 <= number <= largest:
            raise ValueError(f"tag must be from 0 to {largest}, got {number}")
        return number


class Turn:
    """The number of a call and its tags.

    The number is taken when it is first asked for: a call that is refused takes none, so that it
    can be made again.
    """

    def __init__(self, numbering: Numbering, is_blocking: bool) -> None:
        self._numbering, self.is_blocking = numbering, is_blocking
        self._number: int | None = None
        self._check_tag: int | None = None

    @property
    def number(self) -> int:
        """The number of the call."""
        if self._number is None:
            self._number = self._numbering.next_number()
        return self._number

    @property
    def tag(self) -> int:
        """The tag of the call's own messages."""
        if self.is_blocking:
            return self._numbering.blocking_tag
        return self._numbering.async_tag(self.number)

    @property
    def header_tag(self) -> int:
        """The tag of what is sent ahead of the call."""
        return self._numbering.header_tag(self.number)

    @property
    def check_tag(self) -> int:
        """The tag of what the ranks tell each other of the call in checked mode."""
        if self._check_tag is None:
            self._check_tag = self._numbering.next_check_tag()
        return self._check_tag
