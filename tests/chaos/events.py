"""What ranks do, as lines of JSON: one file for each rank, which the judge reads while it grows."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]

# What a time-out says; the group is for whom it waited.
WAITED = re.compile(r"waited .* in round \d+ of .*? for (.*)")


def flag(folder: Path, number: int) -> Path:
    """The file that says that the fault of step `number` is over."""
    return folder / f"over.{number}"


class EventFile:
    """The file of one rank.  Every line is one write, so that no reader finds half of it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = _path(folder, rank).open("ab", buffering=0)
        self.number = -1  # of the step

    def write(self, what: str, **fields: Any) -> None:
        event = {"what": what, "step": self.number, "time": time.time(), **fields}
        self._file.write(json.dumps(event).encode() + b"\n")


def read(folder: Path, rank: int) -> list[Event]:
    """The events of one rank so far."""
    path = _path(folder, rank)
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]


def has_written(folder: Path, rank: int, step: int, what: str) -> bool:
    """Whether a rank has written down an event of a step."""
    return any((each["step"], each["what"]) == (step, what) for each in read(folder, rank))


def _path(folder: Path, rank: int) -> Path:
    return folder / f"events.{rank}"
