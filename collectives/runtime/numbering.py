"""The numbers of calls, and the tags that keep the messages of different calls apart.

MPI's tags are divided into four quarters:

0. the user's own, of `send` and `recv`;
1. of collectives that do not block and of plans, by the number of the call;
2. of headers and counts, which the library sends before such a call, by the same number;
3. one tag for all blocking collectives, one for `subgroup_barrier`, and the others for the
   comparisons of checked mode, in the order in which calls start.

All blocking calls have the same tag, so their executions can be reused.  One tag is enough: on
every rank they run one after the other, and messages between two ranks with the same tag arrive in
the order in which they were sent.

Some communicators are made anew after an error that only some ranks had (`mix`).  MPI may give the
new one the number of the freed one, on which messages are left.  So each call of such a
communicator has a tag of its own, and each communicator begins with another tag.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import validation

_STRIDE = 0x9E3779B1  # odd: tags of consecutive communicators are far apart


class ConcurrentCall(RuntimeError):  # noqa: N818
    """Another thread, or a call that a signal interrupted, uses this communicator."""

    def __init__(self) -> None:
        super().__init__(
            "another call is being made on this communicator; threads that call collectives at "
            "the same time need a communicator each"
        )


class Numbering:
    """The number of calls that a communicator has made, and the tags of its calls.

    Attributes
    ----------
    num_calls_made, num_checks_made : array
        Arrays of one element, which compiled code increments too.
    can_mix : bool
        Whether a call that blocks on one rank may be asynchronous on another one.
    """

    def __init__(self, num_tags: int) -> None:
        self._quarter = num_tags // 4
        self.can_mix = False
        self.num_calls_made: NDArray[np.int64] = np.zeros(1, np.int64)
        self.num_checks_made: NDArray[np.int64] = np.zeros(1, np.int64)
        self._use_tags(0, self._quarter)

    def mix(self, number: int) -> None:
        """Give blocking calls the tags of asynchronous ones, and use half of all tags.

        `number` is that of the communicator, the same on all its ranks.  Communicators of other
        numbers begin with other tags.
        """
        self.can_mix = True
        half = self._quarter // 2
        self._use_tags(number * _STRIDE % half, half)

    def _use_tags(self, first: int, count: int) -> None:
        """Use `count` tags of each quarter, from its tag number `first` on."""
        users, own, headers, others = (k * self._quarter + first for k in range(4))
        self._user_tags = range(users, users + count)
        self.async_tags = range(own, own + count)
        self._header_tags = range(headers, headers + count)
        self.blocking_tag, self.subgroup_tag = others, others + 1
        self.check_tags = range(others + 2, others + count)

    @property
    def num_calls(self) -> int:
        """The number of calls so far."""
        return int(self.num_calls_made[0])

    def tags(self, is_blocking: bool) -> range:
        """Return the tags of calls, by their numbers; none if all have `blocking_tag`."""
        return range(0) if is_blocking and not self.can_mix else self.async_tags

    def next_number(self) -> int:
        """Return the number of a new call."""
        self.num_calls_made[0] += 1
        return int(self.num_calls_made[0])

    def catch_up(self, num_calls: int) -> None:
        """Count at least as many calls as another rank, after the ranks' calls differed."""
        self.num_calls_made[0] = max(self.num_calls, num_calls)

    def tag(self, number: int, is_blocking: bool) -> int:
        """Return the tag of the messages of the call of this number."""
        if is_blocking and not self.can_mix:
            return self.blocking_tag
        return self.async_tag(number)

    def async_tag(self, number: int) -> int:
        """Return the tag of a call of this number that does not block, or of all runs of a plan."""
        return self.async_tags[number % len(self.async_tags)]

    def header_tag(self, number: int) -> int:
        """Return the tag of headers and counts that are sent before the call of this number."""
        return self._header_tags[number % len(self._header_tags)]

    def next_check(self) -> int:
        """Return the number of the next comparison in checked mode."""
        self.num_checks_made[0] += 1
        return int(self.num_checks_made[0])

    def check_tag(self, number: int) -> int:
        """Return the tag of the comparison of this number."""
        return self.check_tags[number % len(self.check_tags)]

    def user_tag(self, tag: object) -> int:
        """Return MPI's tag for the user's.  Raise TypeError or ValueError if that is not valid."""
        number, largest = validation.integer(tag, "tag"), len(self._user_tags) - 1
        if not 0 <= number <= largest:
            raise ValueError(f"tag must be from 0 to {largest}, got {number}")
        return self._user_tags[number]
