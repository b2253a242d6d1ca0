"""Totals: what was sent, added up while it is recorded, for recordings of any length."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from collectives.diagnostics.ledger import Call, Summary


class Kind(NamedTuple):
    """What the calls that are added up have in common.

    Attributes
    ----------
    site : str
        The phase, and in it the line of the program that made the call, if that is recorded.
    """

    site: str
    collective: str
    algorithm: str


class Totals:
    """The calls of one rank, and what it sent in them, by site, collective and algorithm.

    A `Ledger` keeps every call.  This keeps three numbers per kind of call.
    """

    def __init__(self) -> None:
        self._sums: dict[Kind, list[int]] = {}
        self._lock = threading.Lock()  # calls may begin in the progress thread

    def enter(self, entry: list[Any], site: str) -> None:
        """Add a call: an `Entry` as a list; `site` is as in `Recorder.record`."""
        self._add(entry, site, 1)

    def replace(self, entry: list[Any], call: Call, site: str) -> None:
        """Set the call of an entry that was added: see `Recording.replace`."""
        self._add(entry, site, -1)
        entry[0] = call
        self._add(entry, site, 1)

    def _add(self, entry: list[Any], site: str, sign: int) -> None:
        """Add a call, or take it away; without any call there is no sum."""
        call, _, phase, *_ = entry
        where = "/".join(part for part in (phase, site) if part)
        num_bytes = messages = 0
        for _, _, size, segments in call.sent:
            num_bytes += size
            messages += segments
        kind = Kind(where, call.collective, call.algorithm)
        with self._lock:
            sums = self._sums.setdefault(kind, [0, 0, 0])
            sums[0] += sign
            sums[1] += sign * messages
            sums[2] += sign * num_bytes
            if sums[0] == 0:
                del self._sums[kind]

    def summary(self) -> dict[Kind, Summary]:
        """Return the numbers of calls, messages and bytes of this rank, by kind of call.

        The kinds are in the order of their first calls.  Calls in which this rank sent nothing
        count, too.
        """
        with self._lock:
            return {kind: Summary(*sums) for kind, sums in self._sums.items()}
