"""The rows that a device runs, and what the counters say of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.devices.loop import Loop
from collectives.devices.meeting import Meeting
from collectives.devices.row_format import KIND, RISE, VALUE, Words
from collectives.engines import Box, KernelWord
from collectives.lowering import Counter, DeviceKind, DeviceOperation


class Awaited(NamedTuple):
    """An operation for which a device waits, the number of its row, and whether the host does."""

    row: int
    operation: DeviceOperation
    is_by_host: bool

    @property
    def writer(self) -> int:
        """The rank that raises the counter."""
        assert self.operation.counter is not None
        return self.operation.counter.writer


class Watched(ABC):
    """The device program of one rank, from one meeting of the ranks to the next.

    Attributes
    ----------
    text : str
        The call.
    meeting : Meeting
        The meeting.
    operations : sequence of DeviceOperation
        The operations of the program.
    rows : array
        The rows, with addresses, and with the values of the run that was enqueued last.
    """

    def __init__(
        self,
        text: str,
        meeting: Meeting,
        operations: Sequence[DeviceOperation],
        rows: Words,
        loop: Loop,
    ) -> None:
        self.text, self.meeting, self.operations, self.rows = text, meeting, operations, rows
        self._loop = loop
        self._seen, self._since = 0, 0.0

    @property
    def limit(self) -> float | None:
        """The seconds that a run may take on the device; None for the limit of the communicator."""
        return self._loop.limit

    def leave(self) -> None:
        """Let others use the memory of the meeting."""
        self.meeting.leave()

    def awaited(self) -> list[Awaited]:
        """Return what the device still awaits in the run that it has entered last."""
        return self.standing()[1]

    def standing(self) -> tuple[float, list[Awaited]]:
        """Return how long the device is known to have been in that run, and what it awaits.

        Nothing is awaited if the device goes on, or a run is enqueued, while this method looks.
        """
        entered, values = self._num_entered(), self.rows[:, VALUE].copy()
        awaited = self._awaited(entered, values)
        if entered != self._seen:
            self._seen, self._since = entered, time.monotonic()
        has_moved = self._num_entered() != entered or (self.rows[:, VALUE] != values).any()
        return time.monotonic() - self._since, [] if has_moved else awaited

    @abstractmethod
    def _num_entered(self) -> int:
        """Return how many runs the device has entered; 0 if that is not known."""

    @abstractmethod
    def _awaited(self, entered: int, values: Words) -> list[Awaited]:
        """Return what the device awaits in the run of this number, if the last run has `values`."""

    @abstractmethod
    def let_go(self) -> None:
        """Let the device wait for nothing any more; this is done again until it has ended."""


class WatchedRows(Watched):
    """A device program whose rows are enqueued; its counters are in the memory of the host."""

    @property
    def _has_mark(self) -> bool:
        """Whether the device says that it has entered a run."""
        me = self.meeting.board.rank
        return bool(self.operations) and self.operations[0].counter == Counter(me, me)

    def _awaited(self, entered: int, values: Words) -> list[Awaited]:
        num_behind = max(int(values[0]) - entered, 0) if self._has_mark else 0
        return [
            Awaited(at, operation, bool(row[KIND] != DeviceKind.AWAIT))
            for at, operation, word, row in self._awaits()
            if word[0] < values[at] - num_behind * row[RISE]
        ]

    def _num_entered(self) -> int:
        counter = self.operations[0].counter if self._has_mark else None
        return 0 if counter is None else int(self.meeting.word(counter)[0])

    def let_go(self) -> None:
        for _, _, word, row in self._awaits():
            word[0] = max(int(word[0]), int(row[VALUE]))

    def _awaits(self) -> list[tuple[int, DeviceOperation, Any, Any]]:
        """Return the number, operation, counter's memory and words of each row that awaits one."""
        return [
            (at, operation, self.meeting.word(operation.counter), row)
            for at, (operation, row) in enumerate(zip(self.operations, self.rows, strict=False))
            if operation.kind == DeviceKind.AWAIT and operation.counter is not None
        ]


class WatchedKernel(Watched):
    """A device program that a kernel runs, which shows where it stands, and leaves if told."""

    @property
    def _words(self) -> NDArray[np.uint32]:
        """See `KernelWord`."""
        words: NDArray[np.uint32] = self.meeting.kernel_words
        return words

    def _num_entered(self) -> int:
        return int(self._words[KernelWord.ENTERED])

    def _awaited(self, entered: int, values: Words) -> list[Awaited]:
        at = int(self._words[KernelWord.STANDING]) - 1
        return [Awaited(at, self.operations[at], False)] if at >= 0 else []

    def let_go(self) -> None:
        self._words[KernelWord.GENERATION] = 0


class WatchedMessage:
    """A message that the device of this rank is to take out of a box, when it is there.

    Parameters
    ----------
    text : str
        The receive.
    box : Box
        The box.
    value : int
        The value of the words of the box for this message.
    counter : Counter
        The sender and the receiver.
    limit : float or None
        See `Watched.limit`.
    """

    def __init__(
        self, text: str, box: Box, value: int, counter: Counter, limit: float | None
    ) -> None:
        self.text, self._box, self._value, self.limit = text, box, value, limit
        self.operations = (DeviceOperation(DeviceKind.AWAIT, 0, counter, value),)
        self._since = 0.0

    def standing(self) -> tuple[float, list[Awaited]]:
        """Return how long the device is known to have waited, and for what."""
        box, value = self._box, self._value
        if box.entered[0] < value or box.ready[0] >= value:
            self._since = 0.0
            return 0.0, []
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since, [Awaited(0, self.operations[0], False)]

    def let_go(self) -> None:
        """Let the device wait no more."""
        self._box.ready[0] = max(int(self._box.ready[0]), self._value)

    def leave(self) -> None:
        """Do nothing: the sender has the memory."""
