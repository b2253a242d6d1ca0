"""Join a chain of combinations into one operation, which reads each of its operands once."""

from __future__ import annotations

from collections.abc import Iterable

from collectives.lowering.operations import MOST_OPERANDS, DeviceKind, DeviceOperation, Place
from collectives.lowering.spans import Spans


def fused(operations: Iterable[DeviceOperation], spans: Spans) -> list[DeviceOperation]:
    """Return the operations of a rank, with each combination joined to the one that it continues.

    Between the two may be signals that something was read: they come after both.
    """
    joined: list[DeviceOperation] = []
    late: list[DeviceOperation] = []  # signals after the last combination
    for operation in operations:
        if joined and _continues(joined[-1], operation, spans):
            joined[-1] = _chain(joined[-1], operation)
        elif joined and joined[-1].kind == DeviceKind.COMBINE and _is_acknowledgement(operation):
            late.append(operation)
        else:
            joined += [*late, operation]
            late = []
    return joined + late


def _is_acknowledgement(operation: DeviceOperation) -> bool:
    counter = operation.counter
    return operation.kind == DeviceKind.SIGNAL and counter is not None and counter.is_read


def _continues(first: DeviceOperation, second: DeviceOperation, spans: Spans) -> bool:
    """Return whether the second combines the result of the first with one other operand.

    The second writes to the place of the first.
    """
    is_chain = first.kind == second.kind == DeviceKind.COMBINE
    if not is_chain or len(first.operands) == MOST_OPERANDS:
        return False
    target, size = first.target, first.size
    assert target is not None
    if (second.target, second.size) != (target, size) or second.operands.count(target) != 1:
        return False
    other = _other(first, second)
    here = spans.span(target.buffer, target.offset, size)
    return other.rank != target.rank or not here.overlaps(spans.span(*other[1:], size))


def _other(first: DeviceOperation, second: DeviceOperation) -> Place:
    """Return the operand of the second combination that is not the result of the first."""
    return second.operands[second.operands[0] == first.target]


def _chain(first: DeviceOperation, second: DeviceOperation) -> DeviceOperation:
    """Return both as one: the other operand of the second is the last of the first."""
    other = _other(first, second)
    is_left = second.operands[0] == other
    return first._replace(
        operands=(*first.operands, other), lefts=first.lefts | is_left << len(first.operands)
    )
