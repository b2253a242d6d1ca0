"""Calls with mpi4py's arguments, prepared as calls of the library."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.engines import Action
from collectives.mpi4py_compat.buffers import Message, is_in_place, one_block
from collectives.mpi4py_compat.memory import PackedMessage, packed
from collectives.mpi4py_compat.ops import DtypeOperator, operator_for


class Prepared(NamedTuple):
    """A call of the library with its arguments.

    `load` copies the input to where the call reads it, `store` copies the result to where the user
    expects it, and `release` frees the datatypes that they need.
    """

    collective: str
    arguments: dict[str, Any]
    load: tuple[Action, ...] = ()
    store: tuple[Action, ...] = ()
    release: tuple[Action, ...] = ()


def prepare_move(
    collective: str, sent: PackedMessage | None, received: PackedMessage | None, **arguments: Any
) -> Prepared:
    """Prepare a call that sends bytes."""
    load, store, release = _actions(sent, received)
    arrays = {
        "x": None if sent is None else sent.array,
        "out": None if received is None else received.array,
    }
    return Prepared(collective, {**arrays, **arguments}, load, store, release)


def _actions(
    sent: PackedMessage | None, received: PackedMessage | None
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions before the call, after it, and at the end."""
    load, first = (sent.load, sent.release) if sent else ((), ())
    store, second = (received.store, received.release) if received else ((), ())
    return load, store, first + second


def prepare_reduction(
    collective: str, sendbuf: Any, recvbuf: Any, op: MPI.Op, **arguments: Any
) -> Prepared:
    """Prepare a reduction whose result has the length of the input."""
    received = one_block(recvbuf, is_sent=False)
    sent = received
    if not is_in_place(sendbuf):
        sent = one_block(sendbuf, is_sent=True)
        check_alike(sent, received)
    return prepare_with_operator(
        collective, operator_for(op, received.datatype), sent, received, **arguments
    )


def prepare_with_operator(
    collective: str,
    chosen: DtypeOperator,
    sent: Message,
    received: Message | None,
    **arguments: Any,
) -> Prepared:
    """Prepare a call that combines elements."""
    source, target = packed(sent), packed_or_none(received)
    load, store, release = _actions(source, target)
    arrays = {
        "x": source.array.view(chosen.dtype),
        "out": None if target is None else target.array.view(chosen.dtype),
        "op": chosen.operator,
    }
    release += chosen.release
    return Prepared(collective, {**arrays, **arguments}, load, store, release)


def packed_or_none(message: Message | None) -> PackedMessage | None:
    """Return the packed message; None for None."""
    return None if message is None else packed(message)


def receive_place(own: PackedMessage) -> PackedMessage:
    """Return the place in which to receive a message over itself.

    The place is the message's own array, or a new array if its own is read-only.
    """
    array = own.array
    return PackedMessage(array if array.flags.writeable else np.empty_like(array), own.sizes)


# Checks, with mpi4py's messages where it has them


def check_sizes(sent: int, received: int) -> None:
    """Raise ValueError unless a rank sends itself as many bytes as it receives from itself."""
    if sent != received:
        raise ValueError(f"mismatch in what a rank sends itself, {sent} and {received} bytes")


def check_types(sent: Message, received: Message) -> None:
    """Raise ValueError unless two messages have the same datatype."""
    if sent.datatype != received.datatype:
        raise ValueError("mismatch in send and receive MPI datatypes")


def check_alike(sent: Message, received: Message) -> None:
    """Raise ValueError unless two messages have the same datatype and number of elements."""
    check_types(sent, received)
    if sent.num_elements != received.num_elements:
        raise ValueError(
            f"mismatch in send count {sent.num_elements} and receive count {received.num_elements}"
        )


def check_total(what: str, number: int, counts: list[int]) -> None:
    """Raise ValueError, which names `what`, unless a number is the sum of the counts."""
    if number != sum(counts):
        raise ValueError(f"mismatch in {what} and sum(counts) {sum(counts)}")
