"""Read and write lists of actions as PyTorch's pipelining does, as text and as CSV files.

A file has a row for each rank, and a cell for each action: ``0F0``, ``1I2``, ``3SEND_F1``,
``(0F5;3B2)OVERLAP_F_B``.  Empty cells are idle.  PyTorch's lists may also say when parameters are
gathered and gradients summed; these cells are not read, because a `Trainer` decides that.
"""

from __future__ import annotations

import csv
import re
import reprlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from parallel.pipeline.actions import (
    COMPUTATIONS,
    Action,
    Backward,
    Forward,
    Message,
    Overlap,
    Receive,
    Send,
    Update,
)
from parallel.pipeline.schedule import Lists, Schedule

KINDS: dict[str, Callable[[int, int], Action]] = {
    **{kind.letter: kind for kind in COMPUTATIONS},
    "UPDATE": Update,
    "SEND_F": partial(Send, direction="F"),
    "SEND_B": partial(Send, direction="B"),
    "RECV_F": partial(Receive, direction="F"),
    "RECV_B": partial(Receive, direction="B"),
}
SINGLE = re.compile(r"([0-9]{1,9})([A-Z_]+?)([0-9]{1,9})")
OF_SHARDING = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)")
PAIR = re.compile(r"\((.+)\)OVERLAP_F_B")


def parse(text: str) -> Action:
    """Return the action of a cell.  Raise ValueError if it has none.

    Examples
    --------
    >>> from parallel.pipeline.text import parse
    >>> parse("2SEND_F0").code, str(parse("(0F5;3B2)OVERLAP_F_B"))
    ('SEND_F', '(0F5;3B2)OVERLAP_F_B')
    """
    if (pair := PAIR.fullmatch(text)) is not None:
        match [parse_single(part) for part in pair[1].split(";")]:
            case [Forward() as forward, Backward() as backward]:
                return Overlap.of(forward, backward)
        raise ValueError(f"{reprlib.repr(text)} overlaps other actions than an F and a B")
    return parse_single(text)


def parse_single(text: str) -> Action:
    """Return the action of a cell without a pair.  Raise ValueError if it has none."""
    single = SINGLE.fullmatch(text)
    if single is None or single[2] not in KINDS:
        raise ValueError(f"{reprlib.repr(text)} is not an action, such as 0F1, 2SEND_F0 or 1W3")
    return KINDS[single[2]](int(single[1]), int(single[3]))


def parse_row(cells: Iterable[str]) -> list[Action]:
    """Return the actions of one rank.  Raise ValueError for a cell without an action."""
    words = [word for word in map(str.strip, cells) if word]
    return [parse(word) for word in words if not OF_SHARDING.fullmatch(word)]


def write_csv(lists: Lists, path: Path) -> None:
    """Write the actions of all ranks, `lists`, to the file at `path`."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[str(action) for action in row] for row in lists])


def read_csv(path: Path) -> Schedule:
    """Return the schedule of the file at `path`.

    Messages in it are left out: `with_messages` adds them.

    Raises ValueError, with the place in the file, for a cell without an action.
    """
    with path.open(newline="") as file:
        rows = csv.reader(file)
        try:
            lists = [[x for x in parse_row(row) if not isinstance(x, Message)] for row in rows]
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path.name}, row {rows.line_num}: {error}") from None
    return Schedule.of(path.stem, lists)
