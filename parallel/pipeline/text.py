"""Read and write lists of actions as PyTorch's pipelining does, as text and as CSV files.

A file has a row for each rank, and a cell for each action: ``0F0``, ``1I2``, ``3SEND_F1``,
``(0F5;3B2)OVERLAP_F_B``.  Empty cells are idle.  PyTorch's lists may also say when parameters are
gathered and gradients summed; these cells are not read, because a `Trainer` decides that.
"""

from __future__ import annotations

import csv
import re
import reprlib
from collections.abc import Iterable
from pathlib import Path

from parallel.actions import Action
from parallel.pipeline.schedule import Lists, Schedule
from parallel.pipeline.validation import KINDS, OTHERS

SINGLE = re.compile(r"([0-9]{1,9})([A-Z_]+?)([0-9]{,9})")
OF_SHARDING = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)")
PAIR = re.compile(r"\((.+)\)(OVERLAP_F_B)")


def parse(text: str) -> Action:
    """Return the action of a cell.  Raise ValueError if it is none.

    Examples
    --------
    >>> from parallel.pipeline.text import parse
    >>> parse("2SEND_F0").kind, str(parse("(0F5;3B2)OVERLAP_F_B"))
    ('SEND_F', '(0F5;3B2)OVERLAP_F_B')
    """
    if (pair := PAIR.fullmatch(text)) is not None:
        parts = tuple(map(parse_single, pair[1].split(";")))
        if [part.kind for part in parts] != ["F", "B"]:
            raise ValueError(f"{reprlib.repr(text)} overlaps other actions than an F and a B")
        return Action(pair[2], parts[0].stage, parts=parts)
    return parse_single(text)


def parse_single(text: str) -> Action:
    """Return the action of a cell that is no pair.  Raise ValueError if it is none."""
    single = SINGLE.fullmatch(text)
    if single is None or single[2] not in KINDS:
        raise ValueError(f"{reprlib.repr(text)} is not an action, such as 0F1, 2SEND_F0 or 1W3")
    return Action(single[2], int(single[1]), int(single[3]) if single[3] else None)


def parse_row(cells: Iterable[str]) -> list[Action]:
    """Return the actions of one rank.  Raise ValueError for a cell that is none."""
    words = [word for word in map(str.strip, cells) if word]
    return [parse(word) for word in words if not OF_SHARDING.fullmatch(word)]


def write_csv(lists: Lists, path: Path) -> None:
    """Write the actions of all ranks, `lists`, to the file at `path`."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[str(action) for action in row] for row in lists])


def read_csv(path: Path) -> Schedule:
    """Return the schedule of the file at `path`.

    Messages in it are left out: `with_messages` adds them.

    Raises ValueError, with the place in the file, for a cell that is no action.
    """
    with path.open(newline="") as file:
        rows = csv.reader(file)
        try:
            lists = [[x for x in parse_row(row) if x.kind not in OTHERS] for row in rows]
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path.name}, row {rows.line_num}: {error}") from None
    return Schedule.of(path.stem, lists)
