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
    """What is expected: `bytes` and `messages` of all ranks together; None is not checked."""

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

    - `comm`: the communicator; what its sub-communicators send counts as well.
    - `bytes`, `messages`: of everything; an int, `at_most(limit)`, or None for no check.
    - `phases`: for each label of `collectives.phase`, its `Traffic`; the label "" stands for what
      is sent outside every phase.  If it is given, other phases must send nothing.
    - `between`: for pairs (sending group, receiving group) of names, their `Traffic`.
    - `groups`: the ranks of each group that `between` names.

    Yields this rank's open `Ledger`.  After the block, every rank raises AssertionError if a number
    is not as expected; the message lists each difference and everything that was sent.  An
    exception of the block is not replaced.  Raises ValueError, before the block, for a group or a
    rank that does not exist.
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
    """The ranks of each group.  Raises ValueError for one that does not exist."""
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
    """What is not as expected, and what was sent; empty if all is."""
    messages, num_bytes = _matrices(ledger)
    found = list(_compared("all ranks", total, int(num_bytes.sum()), int(messages.sum())))
    if phases is not None:
        found += _in_phases(ledger, phases)
    for (sender, receiver), expected in between.items():
        part = np.ix_(members[sender], members[receiver])
        where = f"from {sender} to {receiver}"
        found += _compared(where, expected, int(num_bytes[part].sum()), int(messages[part].sum()))
    if not found:
        return ""
    sent = [
        f"  {phase or '(outside every phase)'}/{collective}: {each.calls} calls, "
        f"{each.messages} messages, {each.bytes} bytes"
        for (phase, collective), each in ledger.summary().items()
    ]
    return "\n".join([*found, "sent by all ranks:", *(sent or ["  nothing"])])


def _matrices(ledger: Ledger) -> tuple[Matrix, Matrix]:
    """The messages and the bytes from each rank (row) to each rank (column)."""
    messages = np.zeros((ledger.size, ledger.size), np.int64)
    for row in ledger.rows():
        messages[row.src, row.dst] += row.segments
    return messages, ledger.matrix()


def _in_phases(ledger: Ledger, phases: Mapping[str, Traffic]) -> Iterator[str]:
    """What the phases sent otherwise than expected."""
    sent = {phase: each for (phase,), each in ledger.summary(by=["phase"]).items()}
    for phase in dict.fromkeys([*phases, *sent]):
        expected = phases.get(phase, Traffic(0, 0))
        num_bytes, messages = (sent[phase].bytes, sent[phase].messages) if phase in sent else (0, 0)
        where = f"phase {phase!r}" if phase else "outside every phase"
        yield from _compared(where, expected, num_bytes, messages)


def _compared(where: str, expected: Traffic, num_bytes: int, messages: int) -> Iterator[str]:
    """A sentence for each number that is not as expected."""
    for unit, limit, number in (
        ("bytes", expected.bytes, num_bytes),
        ("messages", expected.messages, messages),
    ):
        if limit is not None and not _meets(number, limit):
            yield f"{where}: sent {number} {unit}, expected {limit}"


def _meets(number: int, expected: int | AtMost) -> bool:
    return number <= expected.limit if isinstance(expected, AtMost) else number == expected
