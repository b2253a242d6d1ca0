"""The operations of a device program: what one rank's device does in a call, in this order.

Ranks read each other's memory, and write only their own.  Instead of a message, the sender raises a
counter when its data is ready; the receiver awaits the counter, reads the data where it lies, and
raises another counter when it has read it; the sender awaits that before it overwrites the data.
Ranks that cannot read each other's memory send messages through host memory: these are staged.
"""

from __future__ import annotations

from collections import Counter as Multiset
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from collectives.programs import BUFFERS, SCRATCH

MOST_OPERANDS = 8  # of a combination


class DeviceKind(IntEnum):
    """What an operation does."""

    SIGNAL = 0  # raises a counter of this rank to `value`
    AWAIT = 1  # waits until a counter of a peer has reached `value`
    COPY = 2  # `size` bytes to `target` from the operand
    COMBINE = 3  # `size` bytes at `target` become the combination of the operands
    DIVIDE = 4  # `size` bytes at `target`, by the number of contributions
    SEND = 5  # message `value` of a counter, staged: `size` bytes of the operand
    RECEIVE = 6  # message `value` of a counter, staged: `size` bytes to `target`


SYNCHRONIZING = DeviceKind.SIGNAL, DeviceKind.AWAIT
RAISING = DeviceKind.SIGNAL, DeviceKind.SEND
WAITING = DeviceKind.AWAIT, DeviceKind.RECEIVE


class Counter(NamedTuple):
    """A number that the rank `writer` raises and the rank `reader` awaits.

    Attributes
    ----------
    is_read : bool
        Whether it counts the messages from `reader` that `writer` has read; if not, it counts the
        messages for `reader` that are ready in the memory of `writer`, or that were sent.
    """

    writer: int
    reader: int
    is_read: bool = False

    def __str__(self) -> str:
        return f"{'read' if self.is_read else 'ready'} {self.writer}->{self.reader}"


class Place(NamedTuple):
    """Where data begins: the rank, its buffer (see `programs.BUFFERS`), and an offset in bytes."""

    rank: int
    buffer: int
    offset: int

    def __str__(self) -> str:
        return f"{BUFFERS[self.buffer]} of {self.rank} at {self.offset}"


class DeviceOperation(NamedTuple):
    """One operation; `DeviceKind` says which fields it has.

    Attributes
    ----------
    round : int
        The round of the algorithm.
    lefts : int
        The operands of a combination that come on the left of the first operand, with which it
        begins: bit k stands for operand k.
    """

    kind: DeviceKind
    round: int
    counter: Counter | None = None
    value: int = 0
    target: Place | None = None
    size: int = 0
    operands: tuple[Place, ...] = ()
    lefts: int = 0

    def __str__(self) -> str:
        text = f"{self.round:3} {self.kind.name.lower():8}"
        if self.counter is not None:
            text += f"{self.counter} {self.value} "
        if self.size:
            text += f"{self.size} bytes"
            text += f" to {self.target}" * (self.target is not None)
            text += " from " * bool(self.operands) + self._expression()
        return text.rstrip()

    def _expression(self) -> str:
        """Return the operands from the first one on the left to the last one on the right."""
        lefts = [x for k, x in enumerate(self.operands) if self.lefts >> k & 1]
        rights = [x for k, x in enumerate(self.operands) if not self.lefts >> k & 1]
        return ", ".join(map(str, lefts[::-1] + rights))


@dataclass(frozen=True)
class DeviceProgram:
    """What one rank's device does in a call."""

    operations: tuple[DeviceOperation, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.operations))

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of operations of each kind."""
        kinds = Multiset(operation.kind for operation in self.operations)
        return {kind.name.lower(): kinds[kind] for kind in DeviceKind}

    @cached_property
    def num_driver_calls(self) -> int:
        """The calls of the driver: consecutive signals and awaits are one."""
        groups = groupby(operation.kind in SYNCHRONIZING for operation in self.operations)
        return sum(1 if is_batch else len([*group]) for is_batch, group in groups)

    def num_scratch(self, rank: int) -> int:
        """Return the bytes of its own scratch that the rank of this program reads and writes."""
        ends = [
            place.offset + operation.size
            for operation in self.operations
            for place in (operation.target, *operation.operands)
            if place is not None and (place.rank, place.buffer) == (rank, SCRATCH)
        ]
        return max(ends, default=0)

    @cached_property
    def remote_bytes(self) -> int:
        """The bytes that are read from the memory of peers."""
        return sum(
            operation.size * (operand.rank != operation.target.rank)
            for operation in self.operations
            if operation.target is not None
            for operand in operation.operands
        )
