"""The table of what a program sent by this library, by call site."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from collectives.console import Number, Table
from collectives.diagnostics import ALWAYS

Sums = Sequence[tuple[str, str, str, int, int, int]]
"""One rank's (call site, collective, algorithm, calls, messages, bytes)."""


class Line(NamedTuple):
    """What was sent by one line of a program, in one collective, by one algorithm.

    Attributes
    ----------
    site, collective, algorithm : str
        The file and the line of the call, and the names.
    ranks : int
        The number of ranks that made the call there.
    calls, messages, bytes : int
        Sums over these ranks.
    """

    site: str
    collective: str
    algorithm: str
    ranks: int
    calls: int
    messages: int
    bytes: int


def traffic_table(
    parts: Mapping[int, Sums], size: int, unseen: Iterable[str] = ()
) -> Iterator[str]:
    """Yield the lines of the table, and what the table does not show.

    Parameters
    ----------
    parts : mapping of int to Sums
        What each rank sent, without the ranks that did not answer.
    size : int
        The number of ranks.
    unseen : iterable of str
        Sentences about what ranks sent otherwise.
    """
    missing = [rank for rank in range(size) if rank not in parts]
    lines = summed(parts.values())
    total = Line("total", "", "", len(parts), *_sums([line[-3:] for line in lines]))
    yield f"What {_named(sorted(parts))} sent by this library, by call site (sums over ranks):"
    table = Table(*("site", "collective", "algorithm"), *map(Number, Line._fields[3:]))
    for line in (*lines, total):
        table.add(*line)
    yield from table.lines()
    if missing:
        yield f"The table lacks {_named(missing)}: no answer in time."
    yield from (*unseen, *ALWAYS)


def summed(parts: Iterable[Sums]) -> list[Line]:
    """Return the sums over ranks; the sites that sent most come first."""
    numbers: dict[tuple[str, str, str], list[tuple[int, int, int]]] = defaultdict(list)
    for site, collective, algorithm, calls, messages, num_bytes in chain.from_iterable(parts):
        numbers[site, collective, algorithm].append((calls, messages, num_bytes))
    lines = [Line(*kind, len(rows), *_sums(rows)) for kind, rows in numbers.items()]
    of_site: defaultdict[str, int] = defaultdict(int)
    for line in lines:
        of_site[line.site] += line.bytes
    return sorted(lines, key=lambda line: (-of_site[line.site], line.site, -line.bytes, line))


def _sums(rows: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Return the sums of the columns."""
    calls, messages, num_bytes = (sum(column) for column in zip((0, 0, 0), *rows, strict=True))
    return calls, messages, num_bytes


def _named(ranks: Sequence[int]) -> str:
    """Return the ranks in words: ``"rank 3"``, ``"ranks 0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {words}"
