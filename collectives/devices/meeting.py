"""The meeting of the ranks of a host before a call on a device: what each of them brings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

from collectives.engines import FAILS, WORKS, Board, CallKey
from collectives.lowering import Counter


class Wait(NamedTuple):
    """What an execution waits for, and the ranks that are still missing.

    Attributes
    ----------
    is_over : function
        Returns whether the wait is over.
    missing : function
        Returns the ranks that are still missing.
    is_at_work : bool
        Whether a device is at work meanwhile.
    is_in_code : bool
        Whether the next step can wait too, in compiled code.
    """

    is_over: Callable[[], bool]
    missing: Callable[[], list[int]]
    is_at_work: bool = False
    is_in_code: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether it is over, or the driver has failed, which whoever goes on with it raises."""
        try:
            return self.is_over()
        except RuntimeError:  # as DriverError is
            return True


Waits = Generator[Wait | None, None, Any]
"""The steps of a call: what it waits for between them; None if it waits for a message."""


class Meeting:
    """The records of one call, of all ranks of the communicator on this host.

    Each rank publishes a record, and answers when it has read all others.  A rank that makes the
    call on host arrays does not come, which all ranks see; then nobody answers.
    """

    def __init__(self, board: Board, key: CallKey) -> None:
        self.board, self.key = board, key
        self.ranks = board.local_ranks
        self.slots: dict[int, int] = {}
        self._has_left, self._lock = False, threading.Lock()
        self._records: dict[int, Any] = {}

    @property
    def is_published(self) -> bool:
        """Whether the record of this rank is published."""
        return self.board.rank in self.slots

    def publish(self, fields: Mapping[str, Any]) -> bool:
        """Publish the record of this rank; return False if too many calls are under way."""
        slot = self.board.publish(self.key, fields)
        if slot is not None:
            self.slots[self.board.rank] = slot
        return slot is not None

    def absent(self) -> list[int]:
        """Return the ranks that are known to make the call on host arrays."""
        board = self.board
        others = [rank for rank in self.ranks if rank not in self.slots]
        return [rank for rank in others if board.is_on_host(rank, self.key)]

    def missing(self) -> list[int]:
        """Return the ranks that have not come, and are not known to be absent."""
        for rank in self.ranks:
            if rank not in self.slots:
                slot = self.board.find(rank, self.key)
                if slot is not None:
                    self.slots[rank] = slot
        absent = self.absent()
        return [rank for rank in self.ranks if rank not in self.slots and rank not in absent]

    def for_all(self) -> Wait:
        """Return the wait until all ranks have come, or one is known not to come."""
        return Wait(lambda: not self.missing() or bool(self.absent()), self.missing)

    def record(self, rank: int) -> Any:
        """Return the record of a rank that has come, in the memory that the ranks share."""
        if rank not in self._records:
            self._records[rank] = self.board.record(rank, self.slots[rank])
        return self._records[rank]

    def arrival(self, rank: int) -> Any:
        """Return the word, an array of one element, by which a rank says that it has come again."""
        return self.board.arrival(rank, self.slots[rank])

    def word(self, counter: Counter) -> Any:
        """Return the memory of a counter of this call, an array of one element."""
        writer, reader, is_read = counter
        return self.board.counter(writer, self.slots[writer], reader, is_read)

    @property
    def kernel_words(self) -> Any:
        """The words of this rank's record that `KernelWord` numbers."""
        return self.board.kernel_words(self.slots[self.board.rank])

    def answer(self, verdict: int) -> None:
        """Say that this rank has read all records, and what follows for it."""
        self.record(self.board.rank)["verdict"] = verdict

    def change(self, buffers: Any) -> None:
        """Write the records of other buffers of this rank, which it shows when it comes again."""
        self.record(self.board.rank)["buffers"] = buffers

    def answer_change(self, turn: int, verdict: int) -> Wait:
        """Say that this rank has read the records of other buffers; return the wait for all."""
        self.record(self.board.rank)["answer"] = 4 * turn + verdict

        def missing() -> list[int]:
            answers = ((rank, int(self.record(rank)["answer"])) for rank in self.ranks)
            return [rank for rank, answer in answers if answer < 4 * turn]

        return Wait(lambda: not missing(), missing)

    def all_can_change(self) -> bool:
        """Return whether all ranks have answered that they can use the other buffers."""
        return all(self.record(rank)["answer"] % 4 == WORKS for rank in self.ranks)

    def verdicts(self) -> dict[int, int]:
        """Return the answers of all ranks; 0 where there is none yet."""
        return {rank: int(self.record(rank)["verdict"]) for rank in self.ranks}

    def for_answers(self, least: int = 1) -> Wait:
        """Return the wait until all ranks have answered with at least this number."""

        def missing() -> list[int]:
            return [rank for rank, verdict in self.verdicts().items() if verdict < least]

        return Wait(lambda: not missing(), missing)

    def is_too_late_to_fail(self) -> bool:
        """Take back the answer of this rank; return whether others may have seen all answers."""
        self.answer(FAILS)
        with self._lock:  # so that what is read now was written before others see that
            return all(self.verdicts().values())

    def withdraw(self) -> None:
        """Take back the record of this rank, because the ranks do not meet."""
        self.board.withdraw(self.slots[self.board.rank])
        self._has_left = True

    def leave(self) -> None:
        """Let all ranks use the memory of their records for other calls."""
        if self._has_left:
            return
        self._has_left = True
        for rank in self.ranks:
            self.board.acknowledge(rank, self.key)
