"""Decisions: what was measured on this machine, and chooses algorithms.

`ring bench tune` measures the costs of a machine, from which the times of all algorithms are
predicted, and the algorithms that are fastest, by number of ranks and size.  It writes one file of
JSON:

    {"machine": {
        "facts": {"mpi": "Open MPI 5.0.8", "date": "2026-11-30", ...},
        "links": {"same_host": [{"up_to_bytes": 4056, "overhead_seconds": 1e-07, ...}, ...], ...},
        "call_seconds": 4e-07, ...},
     "measured": {"4": {
        "facts": {"mpi": "Open MPI 5.0.8", "date": "2026-11-30", ...},
        "tables": {"all_reduce": [{"up_to": 32768, "best": ["recursive_doubling"]},
                                  {"up_to": null, "best": ["ring", "two_shot"]}], ...}},
                  "8 on 4 hosts": {...}, ...},
     "measured_on_devices": {"4": {...}, ...}}

The machine is null if none was fitted.  What was measured on arrays of GPUs, which the ranks of one
host read in each other's memory, is apart; files of earlier versions do not have it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from collectives.schedule import SPECS, Topology
from collectives.selection import machine_file
from collectives.selection.fields import fields, items, shown, texts, within
from collectives.selection.labels import parse_default
from collectives.selection.machine_file import Fitted
from collectives.simulation import DEFAULT, Machine


class Row(NamedTuple):
    """The algorithms for up to `largest` bytes (n), best first, as a caller names them."""

    largest: float
    labels: tuple[str, ...]


class Ranks(NamedTuple):
    """How many ranks were measured, on how many hosts."""

    number: int
    num_hosts: int = 1

    def __str__(self) -> str:
        return f"{self.number}{self._on_hosts}"

    @property
    def in_words(self) -> str:
        """The numbers as text, with their unit."""
        return f"{self.number} ranks{self._on_hosts}"

    @property
    def _on_hosts(self) -> str:
        return f" on {self.num_hosts} hosts" if self.num_hosts > 1 else ""


class Measured(NamedTuple):
    """A measurement on one number of ranks.

    Attributes
    ----------
    facts : mapping of str to str
        Texts that describe the measurement.
    tables : mapping of str to tuple of Row
        The rows of each measured collective, by size; the last row has no limit.
    """

    facts: Mapping[str, str]
    tables: Mapping[str, tuple[Row, ...]]


@dataclass(frozen=True, eq=False)
class Decisions:
    """Measurements by numbers of ranks and hosts, and the fitted machine, if there is one.

    Decisions are equal only to themselves, so that they can be a cache key.

    Attributes
    ----------
    measured : mapping of Ranks to Measured
    fitted : Fitted or None
    on_devices : mapping of Ranks to Measured
        Measurements on devices.
    where : str
        Where all were measured, as text.
    """

    measured: Mapping[Ranks, Measured]
    fitted: Fitted | None = None
    on_devices: Mapping[Ranks, Measured] = field(default_factory=dict)
    where: str = ""

    @classmethod
    def from_json(cls, text: str | bytes) -> Decisions:
        """Return the decisions in a text of `to_json`.

        Raises ValueError, with the place of an error.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"decisions are not JSON: {error}") from None
        fields(data, "decisions", ("machine", "measured"), (_ON_DEVICES,))
        host, devices = (_by_ranks(data.get(name, {}), name) for name in ("measured", _ON_DEVICES))
        fitted = data["machine"]
        machine = None if fitted is None else machine_file.from_json(fitted, "machine")
        return cls(host, machine, devices)

    @cached_property
    def of_devices(self) -> Decisions:
        """The measurements on devices, alone; always the same object."""
        return Decisions(self.on_devices, where="on devices of ")

    def including(self, ranks: Ranks, measurement: Measured) -> Decisions:
        """Return these decisions and one more measurement, in place of tables of as many ranks."""
        older = self.measured[ranks].tables if ranks in self.measured else {}
        merged = measurement._replace(tables={**older, **measurement.tables})
        return replace(self, measured={**self.measured, ranks: merged})

    def including_devices(self, ranks: Ranks, measurement: Measured) -> Decisions:
        """Return these decisions and one more measurement on devices; see `including`."""
        return replace(self, on_devices=self.of_devices.including(ranks, measurement).measured)

    def with_machine(self, fitted: Fitted) -> Decisions:
        """Return these decisions with another machine."""
        return replace(self, fitted=fitted)

    def to_json(self) -> str:
        """Return the decisions as JSON, in the order of the numbers of ranks."""
        machine = None if self.fitted is None else machine_file.as_json(self.fitted)
        measured = {
            name: {str(ranks): _as_dict(by_ranks[ranks]) for ranks in sorted(by_ranks)}
            for name, by_ranks in (("measured", self.measured), (_ON_DEVICES, self.on_devices))
        }
        return json.dumps({"machine": machine, **measured}, indent=1) + "\n"

    def machine_for(self, topology: Topology | None) -> Machine | None:
        """Return the fitted machine, if it has links between all ranks on these hosts."""
        machine = None if self.fitted is None else self.fitted.machine
        return machine if machine is not None and machine.connects(topology) else None

    def limits(self, collective: str) -> set[float]:
        """Return the sizes at which its rows end."""
        tables = [measured.tables.get(collective, ()) for measured in self.measured.values()]
        return {row.largest for rows in tables for row in rows}

    def ranked(
        self, collective: str, ranks: Ranks, num_bytes: float, *, instead_of: Ranks | None = None
    ) -> Iterator[tuple[str, str]]:
        """Yield algorithms measured on `ranks`, best first, with a text that names the table.

        Some may not serve.  `instead_of` are the ranks of the call, if they are others.
        """
        measured = self.measured.get(ranks)
        if measured is not None and (rows := measured.tables.get(collective)):
            row = next(row for row in rows if num_bytes <= row.largest)
            nearest = "" if instead_of is None else f", the nearest to {instead_of}"
            sizes = size_range(row.largest, num_bytes, [row.largest for row in rows])
            where = f"table measured {self.where or 'on '}{ranks.in_words}{nearest}: {sizes}"
            yield from ((label, where) for label in row.labels)

    def ranked_nearby(
        self, collective: str, wanted: Ranks, num_bytes: float
    ) -> Iterator[tuple[str, str]]:
        """Yield the same from tables of other numbers of ranks, the nearest first.

        What was measured on one host says nothing about several, and the other way round.
        """
        for ranks in self._nearest(wanted):
            if ranks != wanted:
                yield from self.ranked(collective, ranks, num_bytes, instead_of=wanted)

    def _nearest(self, wanted: Ranks) -> list[Ranks]:
        """Return the numbers of ranks that were measured, the nearest by ratio first."""

        def distance(ranks: Ranks) -> tuple[list[Fraction], Ranks]:
            pairs = zip(ranks, wanted, strict=True)
            return [Fraction(max(pair), min(pair)) for pair in pairs], ranks

        alike = [r for r in self.measured if (r.num_hosts > 1) == (wanted.num_hosts > 1)]
        return sorted(alike, key=distance)


def size_range(largest: float, num_bytes: float, limits: Iterable[float]) -> str:
    """Return a text for the sizes from the limit below `num_bytes` up to `largest`."""
    below = max((limit for limit in limits if limit < num_bytes), default=None)
    words = [] if below is None else [f"above {below}"]
    words += [] if largest == math.inf else [f"up to {largest}"]
    return f"{' and '.join(words)} bytes" if words else "every size"


def machine_in(path: Path | None) -> Machine:
    """Return the `Machine` in a file of ``ring bench tune``.

    Parameters
    ----------
    path : Path or None
        The file; None: a machine that does not exist, with fast links.

    Raises
    ------
    ValueError
        If the file has no machine.
    OSError
        If the file cannot be read.
    """
    if path is None:
        return DEFAULT
    try:
        fitted = Decisions.from_json(path.read_bytes()).fitted
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if fitted is None:
        raise ValueError(f"{path} has no machine; `ring bench tune` writes one")
    return fitted.machine


# In these functions `place` is the path of a value, for error messages.


def _as_dict(measured: Measured) -> dict[str, Any]:
    tables = {
        collective: [
            {"up_to": None if row.largest == math.inf else row.largest, "best": row.labels}
            for row in rows
        ]
        for collective, rows in measured.tables.items()
    }
    return {"facts": dict(measured.facts), "tables": tables}


_ON_DEVICES = "measured_on_devices"
_MAX_LENGTH = 500  # of an algorithm with its options, in characters
_NUMBER = "([1-9][0-9]{,8})"
_RANKS = re.compile(f"{_NUMBER}(?: on {_NUMBER} hosts)?")


def _by_ranks(value: object, place: str) -> dict[Ranks, Measured]:
    data = fields(value, place)
    return {
        _ranks(key, place): _measured(measurement, f"{place}.{key}")
        for key, measurement in data.items()
    }


def _ranks(text: str, place: str) -> Ranks:
    match = _RANKS.fullmatch(text)
    if match is None or match[2] == "1":
        raise ValueError(
            f"{place}: {shown(text)} is not a number of ranks, like '8' or '8 on 4 hosts'"
        )
    return Ranks(int(match[1]), int(match[2] or 1))


def _measured(value: object, place: str) -> Measured:
    data = fields(value, place, Measured._fields)
    tables = fields(data["tables"], f"{place}.tables")
    return Measured(
        texts(data["facts"], f"{place}.facts"),
        {
            name: _table(rows, within(f"{place}.tables", name), name)
            for name, rows in tables.items()
        },
    )


def _table(value: object, place: str, collective: str) -> tuple[Row, ...]:
    if collective not in SPECS:
        raise ValueError(f"{place}: there is no such collective; known: {', '.join(SPECS)}")
    rows = [
        _row(entry, f"{place}[{number}]", collective)
        for number, entry in enumerate(items(value, place, "rows"))
    ]
    limits = [row.largest for row in rows]
    if limits != sorted(set(limits)) or limits[-1] != math.inf:
        raise ValueError(f"{place}: up_to must grow from row to row, and be null in the last")
    return tuple(rows)


def _row(value: object, place: str, collective: str) -> Row:
    data = fields(value, place, ("up_to", "best"))
    largest = data["up_to"]
    if largest is not None and (type(largest) is not int or largest < 0):
        raise ValueError(f"{place}.up_to must be a number of bytes or null, not {shown(largest)}")
    best = items(data["best"], f"{place}.best", "algorithms")
    labels = tuple(_label(label, f"{place}.best", collective) for label in best)
    return Row(math.inf if largest is None else largest, labels)


def _label(value: object, place: str, collective: str) -> str:
    if not isinstance(value, str) or len(value) > _MAX_LENGTH:
        raise ValueError(f"{place}: algorithm must be a name, not {shown(value)}")
    try:
        return parse_default(collective, value).label
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
