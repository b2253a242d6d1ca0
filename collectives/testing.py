"""Checks for the tests of other programs: what a block of code sends, to the byte.

from collectives.testing import Traffic, assert_traffic

def test_a_step_sends_its_gradients_once(comm):
    with assert_traffic(comm, phases={"backward": Traffic(bytes=6 * model.num_bytes)}):
        step(model)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.communicator import Communicator
from collectives.diagnostics import Ledger

__all__ = ["AtMost", "Traffic", "assert_traffic", "at_most"]


class AtMost(NamedTuple):
    """A limit instead of an exact number; `at_most` makes one."""

    limit: int

    def __str__(self) -> str:
        return f"at most {self.limit}"


def at_most(limit: int) -> AtMost:
    """Return an expectation that numbers up to `limit` meet."""
    return AtMost(limit)


Matrix = NDArray[np.int64]
Expected = int | AtMost | None


class Traffic(NamedTuple):
    """The expected traffic of all ranks together.

    Attributes
    ----------
    bytes, messages : int or AtMost, optional
        The expected numbers.  A number that is None is not checked.
    """

    bytes: Expected = None
    messages: Expected = None


@contextmanager
def assert_traffic(
    comm: Communicator,
    bytes: Expected = None,
    messages: Expected = None,
    *,
    phases: Mapping[str, Traffic] | None = None,
    between: Mapping[tuple[str, str], Traffic] | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
) -> Iterator[Ledger]:
    """Check what all ranks of a communicator send in a `with` block.  All ranks use it alike.

        with assert_traffic(comm, bytes=6_000, messages=at_most(12)):
            comm.all_reduce(x)

    An exception of the block is not replaced.

    Parameters
    ----------
    comm : Communicator
        The communicator.  What its sub-communicators send counts as well.
    bytes, messages : int or AtMost, optional
        The expected bytes and messages of everything: a number, or `at_most(limit)`.  A number that
        is None is not checked.
    phases : mapping of str to Traffic, optional
        The traffic of each label of `collectives.phase`.  The label ``""`` stands for what is sent
        outside every phase.  If `phases` is given, phases that it does not name must send nothing.
    between : mapping of (str, str) to Traffic, optional
        The traffic from one group to another, by the names (sending group, receiving group).
    groups : mapping of str to sequence of int, optional
        The ranks of each group that `between` names.

    Yields
    ------
    Ledger
        This rank's ledger, which records until the end of the block.

    Raises
    ------
    AssertionError
        On every rank after the block, if a number is not as expected.  The message lists each
        difference and everything that was sent.
    ValueError
        Before the block, for a group or a rank that does not exist.
    """
    members = _members(comm.size, between or {}, groups or {})
    with comm.record() as ledger:
        yield ledger
    whole = ledger.gather()
    total = Traffic(bytes, messages)
    said = "" if whole is None else _objections(whole, total, phases, between or {}, members)
    told = comm.broadcast(np.frombuffer(said.encode(), np.uint8) if comm.rank == 0 else None)
    if said := told.tobytes().decode():
        raise AssertionError(said)


def _members(
    size: int, between: Mapping[tuple[str, str], Traffic], groups: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """Return the ranks of each group.

    Raises ValueError for a group or a rank that does not exist.
    """
    for name in (name for pair in between for name in pair):
        if name not in groups:
            raise ValueError(f"between: there is no group {name!r}; groups has {sorted(groups)}")
    for name, ranks in groups.items():
        for rank in ranks:
            if not 0 <= rank < size:
                raise ValueError(f"groups: {name!r} has rank {rank}, but there are {size} ranks")
    return {name: list(ranks) for name, ranks in groups.items()}


def _objections(
    ledger: Ledger,
    total: Traffic,
    phases: Mapping[str, Traffic] | None,
    between: Mapping[tuple[str, str], Traffic],
    members: Mapping[str, list[int]],
) -> str:
    """Return what is not as expected, and what was sent; "" if all is as expected."""
    messages, num_bytes = _matrices(ledger)
    lines = list(_compared("all ranks", total, int(num_bytes.sum()), int(messages.sum())))
    if phases is not None:
        lines += _in_phases(ledger, phases)
    for (sender, receiver), expected in between.items():
        part = np.ix_(members[sender], members[receiver])
        where = f"from {sender} to {receiver}"
        lines += _compared(where, expected, int(num_bytes[part].sum()), int(messages[part].sum()))
    if not lines:
        return ""
    sent = [
        f"  {phase or '(outside every phase)'}/{collective}: {sums.calls} calls, "
        f"{sums.messages} messages, {sums.bytes} bytes"
        for (phase, collective), sums in ledger.summary().items()
    ]
    return "\n".join([*lines, "sent by all ranks:", *(sent or ["  nothing"])])


def _matrices(ledger: Ledger) -> tuple[Matrix, Matrix]:
    """Return the numbers of messages and bytes from each rank (row) to each rank (column)."""
    messages = np.zeros((ledger.size, ledger.size), np.int64)
    for row in ledger.rows():
        messages[row.src, row.dst] += row.segments
    return messages, ledger.matrix()


def _in_phases(ledger: Ledger, phases: Mapping[str, Traffic]) -> Iterator[str]:
    """Yield what the phases sent otherwise than expected."""
    sent = {phase: sums for (phase,), sums in ledger.summary(by=["phase"]).items()}
    for phase in dict.fromkeys([*phases, *sent]):
        expected = phases.get(phase, Traffic(0, 0))
        num_bytes, messages = (sent[phase].bytes, sent[phase].messages) if phase in sent else (0, 0)
        where = f"phase {phase!r}" if phase else "outside every phase"
        yield from _compared(where, expected, num_bytes, messages)


def _compared(where: str, expected: Traffic, num_bytes: int, messages: int) -> Iterator[str]:
    """Yield a sentence for each number that is not as expected."""
    for unit, limit, number in (
        ("bytes", expected.bytes, num_bytes),
        ("messages", expected.messages, messages),
    ):
        if limit is not None and not _meets(number, limit):
            yield f"{where}: sent {number} {unit}, expected {limit}"


def _meets(number: int, expected: int | AtMost) -> bool:
    return number <= expected.limit if isinstance(expected, AtMost) else number == expected
