"""At most so many ranks at a time, in all processes that run tests side by side.

Ranks that wait take turns with those that compute: twice the ranks on a core need more than twice
the time.  A test that starts a job is marked with the number of its ranks, and begins when so many
places are free.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

RANKS_PER_CORE = 4
POLL = 0.05  # seconds between two looks for free places


def folder_of_places() -> Path:
    """Return the folder that all tests of a user on this machine share, and make it."""
    folder = Path(tempfile.gettempdir(), f"ring-collectives-places-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    return folder


def number_of_places() -> int:
    """Return how many ranks this machine runs at a time."""
    return RANKS_PER_CORE * (os.cpu_count() or 1)


class Budget:
    """Places for ranks: files of a folder, which are locked while a job has them.

    The system unlocks the files of a process that dies.

    Parameters
    ----------
    folder : Path
        Where the files are; the processes that share it share the places.
    size : int
        The number of places.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self._places = [f"place-{number}" for number in range(size)]

    @contextmanager
    def taken(self, num_ranks: int) -> Iterator[None]:
        """Take places for a job when so many are free; all, if it has more ranks than places.

        One process at a time takes places.  So small jobs that come later do not keep a large one
        waiting, and two jobs do not wait for the places of each other.  Who needs none does not
        wait for its turn.
        """
        with ExitStack() as places, ExitStack() as turn:
            if num_ranks:
                self._take(["turn"], 1, turn)
                self._take(self._places, min(num_ranks, len(self._places)), places)
                turn.close()
            yield

    def _take(self, names: list[str], number: int, taken: ExitStack) -> None:
        """Lock so many of the files until `taken` ends."""
        for descriptor in islice(self._locked(names), number):
            taken.callback(os.close, descriptor)

    def _locked(self, names: list[str]) -> Iterator[int]:
        """Lock the files as they become free, and yield their descriptors."""
        left = list(names)
        while left:
            for name in list(left):
                if (descriptor := self._lock(name)) is not None:
                    left.remove(name)
                    yield descriptor
            time.sleep(POLL)

    def _lock(self, name: str) -> int | None:
        """Lock a file; return its descriptor, or None if another process has locked it."""
        descriptor = os.open(self._folder / name, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor
