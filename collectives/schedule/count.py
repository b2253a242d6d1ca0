"""Count the costs of schedules, with which every formula is compared.

Sizes may be in any unit, also fractions of bytes; where blocks are equal all results are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from collectives.schedule.contracts import Case, holders
from collectives.schedule.rounds import Block, Round, Schedule, original

Size = int | Fraction


class Counts(NamedTuple):
    """The counted values of the formulas in the registry; see `algorithms.Algorithm`."""

    rounds: int
    startups: int
    messages: int
    max_bytes_per_rank: Size
    total_bytes: Size
    critical_bytes: Size
    reduction_bytes: Size


def even_sizes(collective: str, case: Case, n: int) -> dict[Block, Size]:
    """Return the sizes of all blocks if a vector of `n` bytes is divided evenly.

    Sizes may be fractions of a byte.  n is the whole vector; for all-to-all that of one rank's
    input.
    """
    blocks = holders(collective, case)
    num_each = len(blocks) // (case.size if collective == "all_to_all" else 1)
    size = Fraction(n, max(num_each, 1))
    return dict.fromkeys(blocks, int(size) if size.denominator == 1 else size)


class _SizeOfNames(dict[Block, Size]):
    """The sizes of all blocks, and of the names that stood for one, found once."""

    def __missing__(self, name: Block) -> Size:
        size = self[name] = self[original(name, self)]
        return size


def count(schedules: Sequence[Schedule], sizes: Mapping[Block, Size]) -> Counts:
    """Return the costs of the schedules of all ranks.

    `sizes` has the sizes of all blocks of the collective.
    """
    sizes = _SizeOfNames(sizes)
    loads = [[_load(operations, sizes) for operations in schedule] for schedule in schedules]
    rounds = list(zip(*loads, strict=True))
    totals = [[sum(column) for column in zip(*mine, strict=True)] for mine in loads if mine]
    return Counts(
        rounds=len(rounds),
        startups=sum(max(max(load.sends, load.receives) for load in ranks) for ranks in rounds),
        messages=sum(total[0] for total in totals),
        max_bytes_per_rank=max((max(total[2:4]) for total in totals), default=0),
        total_bytes=sum(total[2] for total in totals),
        critical_bytes=sum(
            max(max(load.sent, load.received) for load in ranks) for ranks in rounds
        ),
        reduction_bytes=max((total[4] for total in totals), default=0),
    )


class _Load(NamedTuple):
    """The load of one rank in one round: its messages, and the bytes sent, received, combined."""

    sends: int
    receives: int
    sent: Size
    received: Size
    combined: Size


def _load(operations: Round, sizes: Mapping[Block, Size]) -> _Load:
    sends = receives = 0
    sent: Size = 0
    received: Size = 0
    combined: Size = 0
    for op in operations:
        size = sum(map(sizes.__getitem__, op.blocks))
        if op.kind == "send":
            sends, sent = sends + 1, sent + size
        elif op.peer is not None:
            receives, received = receives + 1, received + size
        if op.side is not None:
            combined += size
    return _Load(sends, receives, sent, received, combined)
