"""Operations of the fake GPU that use the same memory without an order between them.

What certainly comes before an operation is a vector clock: how many operations of each stream.
Streams are ordered by events, by words that one writes and another one awaits, and by the host: it
enqueues an operation after what it has seen to be complete.  All threads of the host count as one,
so an order that they do not have may be supposed, but none is missed.

An operation that only happens to be executed before another one is not before it, so a seed that
is lucky does not hide what is wrong.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

Clock = Mapping[int, int]  # of streams
_PAGE_BITS = 12  # uses of memory are looked up by pages of this size
NOTHING: Clock = MappingProxyType({})


class Use(NamedTuple):
    """A use of memory by an operation, which is the one of this number on its stream."""

    start: int
    end: int
    stream: int
    number: int
    is_written: bool
    what: str

    def __str__(self) -> str:
        verb = "writes" if self.is_written else "reads"
        size = self.end - self.start
        return (
            f"{self.what} on stream {self.stream:#x}, which {verb} {size} bytes at {self.start:#x}"
        )


class Races:
    """The uses of memory so far, and the clocks of the streams.

    `host`: what the host has seen to be complete.  `is_paused`: whether nothing is objected to.
    """

    def __init__(self) -> None:
        self.host: Clock = NOTHING
        self.is_paused = False
        self._clocks: dict[int, Clock] = {}
        self._uses = defaultdict[int, list[Use]](list)
        self._raised = defaultdict[int, tuple[list[int], list[Clock]]](lambda: ([], []))

    def of(self, stream: int) -> Clock:
        """What is certainly over when the next operation of a stream begins."""
        return self._clocks.get(stream, NOTHING)

    def see(self, clock: Clock) -> None:
        """Note that the host has seen this to be complete."""
        self.host = _joined(self.host, clock)

    def begin(self, stream: int, *before: Clock) -> Clock:
        """Note that an operation begins, after these; return its clock, which it belongs to."""
        clock = dict(_joined(self.of(stream), *before))
        clock[stream] = clock.get(stream, 0) + 1
        self._clocks[stream] = clock
        return clock

    # Words that streams write and await

    def raised(self, word: int, value: int) -> Clock:
        """The clock of the first operation that has given a word at least this value.

        It is that of the host if no stream has.
        """
        values, clocks = self._raised[word]
        at = bisect_left(values, value)
        return clocks[at] if at < len(values) else self.host

    def raise_to(self, stream: int, word: int, value: int, before: int) -> str:
        """Note that a stream writes a word, which was `before`; return what is wrong, or ""."""
        values, clocks = self._raised[word]
        if values and values[-1] != before:  # the host has written it
            values.clear()
            clocks.clear()
        clock, why = self.of(stream), ""
        if values and value <= values[-1]:
            why = f"the word at {word:#x} goes back from {values[-1]} to {value}"
        elif values and not _is_within(clocks[-1], clock):
            why = f"two streams write the word at {word:#x} in no order"
        values.append(max(value, values[-1] if values else value))
        clocks.append(clock)
        return "" if self.is_paused else why

    # Memory

    def use(self, used: Use) -> Iterator[str]:
        """Note a use; say what is wrong with it."""
        clock = self.of(used.stream)
        for page in range(used.start >> _PAGE_BITS, (used.end - 1 >> _PAGE_BITS) + 1):
            rest = []
            for other in self._uses[page]:
                is_common = used.start < other.end and other.start < used.end
                is_ordered = clock.get(other.stream, 0) >= other.number
                if is_common and used.is_written | other.is_written and not is_ordered:
                    if not self.is_paused:
                        yield f"nothing orders {used}, and {other}"
                elif not _stands_for(used, other):
                    rest.append(other)
            self._uses[page] = [*rest, used]

    def forget(self, start: int, size: int) -> None:
        """Forget the uses of memory that is new now."""
        end = start + size
        for page in range(start >> _PAGE_BITS, (end - 1 >> _PAGE_BITS) + 1):
            if page in self._uses:
                uses = self._uses[page]
                self._uses[page] = [x for x in uses if x.end <= start or end <= x.start]


def _joined(*clocks: Clock) -> Clock:
    """What is in any of these; the first one itself if nothing is added."""
    first, *others = clocks
    for other in others:
        if not _is_within(other, first):
            first = {s: max(first.get(s, 0), other.get(s, 0)) for s in {**first, **other}}
    return first


def _is_within(one: Clock, other: Clock) -> bool:
    return one is other or all(other.get(stream, 0) >= number for stream, number in one.items())


def _stands_for(used: Use, other: Use) -> bool:
    """Whether what comes after a use also comes after an earlier one, which can be forgotten."""
    is_inside = used.start <= other.start and other.end <= used.end
    is_same = used.stream == other.stream and not other.is_written
    return is_inside and (used.is_written or is_same)
