"""Decision tables: the algorithms that were measured to be fastest, by ranks, hosts and size.

`python -m bench tune` measures them and writes them as JSON:

    {"measured": {"4": {
        "facts": {"mpi": "Open MPI 5.0.8", "when": "2025-07-01", ...},
        "machine": {"alpha": 2e-06, "beta": 1.5e-10, "gamma": 1e-10},
        "tables": {"all_reduce": [{"up_to": 32768, "best": ["recursive_doubling"]},
                                  {"up_to": null, "best": ["ring", "two_shot"]}], ...}},
                  "8 on 4 hosts": {...}, ...}}
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from collectives.schedule import SPECS
from collectives.selection.cost import Machine
from collectives.selection.labels import parse_label


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
        """As text, with its unit."""
        return f"{self.number} ranks{self._on_hosts}"

    @property
    def _on_hosts(self) -> str:
        return f" on {self.num_hosts} hosts" if self.num_hosts > 1 else ""


class Measured(NamedTuple):
    """A measurement on one number of ranks.

    `facts`: texts that describe the measurement.  `tables`: the rows of each measured collective,
    by size; the last row has no limit.
    """

    facts: Mapping[str, str]
    machine: Machine
    tables: Mapping[str, tuple[Row, ...]]


@dataclass(frozen=True, eq=False)
class Decisions:
    """Measurements by numbers of ranks and hosts.  Equal only to itself: it can be a cache key."""

    measured: Mapping[Ranks, Measured]

    @classmethod
    def from_json(cls, text: str | bytes) -> Decisions:
        """The decisions in a text of `to_json`.  Raises ValueError, with the place of an error."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"decisions are not JSON: {error}") from None
        found = _object(_object(data, "decisions", ("measured",))["measured"], "measured")
        return cls({_ranks(key): _measured(each, f"measured.{key}") for key, each in found.items()})

    def including(self, ranks: Ranks, found: Measured) -> Decisions:
        """These decisions and one more measurement; its tables replace those of as many ranks."""
        older = self.measured[ranks].tables if ranks in self.measured else {}
        return Decisions({**self.measured, ranks: found._replace(tables={**older, **found.tables})})

    def to_json(self) -> str:
        """The decisions as JSON, in the order of the numbers of ranks."""
        data = {str(ranks): _as_dict(self.measured[ranks]) for ranks in sorted(self.measured)}
        return json.dumps({"measured": data}, indent=1) + "\n"

    def machine(self, size: int, num_hosts: int = 1) -> Machine:
        """The machine measured on `size` ranks, or on the nearest number of ranks."""
        nearest = self._nearest(Ranks(size, num_hosts))
        return self.measured[nearest[0]].machine if nearest else Machine()

    def limits(self, collective: str) -> set[float]:
        """The sizes at which its rows end."""
        tables = [found.tables.get(collective, ()) for found in self.measured.values()]
        return {row.largest for rows in tables for row in rows}

    def ranked(
        self, collective: str, size: int, num_bytes: float, num_hosts: int = 1
    ) -> Iterator[tuple[str, str]]:
        """Algorithms, best first, each with a text that names its table; some may not serve.

        The table of the number of ranks nearest to `size` comes first.  What was measured on one
        host says nothing about several, and the other way round.
        """
        wanted = Ranks(size, num_hosts)
        for ranks in self._nearest(wanted):
            if rows := self.measured[ranks].tables.get(collective):
                row = next(row for row in rows if num_bytes <= row.largest)
                nearest = "" if ranks == wanted else f", the nearest to {wanted}"
                sizes = size_range(row.largest, num_bytes, [row.largest for row in rows])
                where = f"table measured on {ranks.in_words}{nearest}: {sizes}"
                yield from ((label, where) for label in row.labels)

    def _nearest(self, wanted: Ranks) -> list[Ranks]:
        """The numbers of ranks that were measured, the nearest by ratio first."""

        def distance(ranks: Ranks) -> tuple[list[Fraction], Ranks]:
            pairs = zip(ranks, wanted, strict=True)
            return [Fraction(max(pair), min(pair)) for pair in pairs], ranks

        alike = [r for r in self.measured if (r.num_hosts > 1) == (wanted.num_hosts > 1)]
        return sorted(alike, key=distance)


def size_range(largest: float, num_bytes: float, limits: Iterable[float]) -> str:
    """A text for the sizes from the limit below `num_bytes` up to `largest`."""
    below = max((limit for limit in limits if limit < num_bytes), default=None)
    words = [] if below is None else [f"above {below}"]
    words += [] if largest == math.inf else [f"up to {largest}"]
    return f"{' and '.join(words)} bytes" if words else "every size"


# To and from JSON.  `place` is the path of a value, for error messages.


def _as_dict(measured: Measured) -> dict[str, Any]:
    tables = {
        collective: [
            {"up_to": None if row.largest == math.inf else row.largest, "best": row.labels}
            for row in rows
        ]
        for collective, rows in measured.tables.items()
    }
    return {**measured._asdict(), "machine": measured.machine._asdict(), "tables": tables}


_NUMBER = "([1-9][0-9]{,8})"
_RANKS = re.compile(f"{_NUMBER}(?: on {_NUMBER} hosts)?")


def _ranks(text: str) -> Ranks:
    found = _RANKS.fullmatch(text)
    if found is None or found[2] == "1":
        raise ValueError(f"measured: {text!r} is not a number of ranks, like '8' or '8 on 4 hosts'")
    return Ranks(int(found[1]), int(found[2] or 1))


def _measured(value: object, place: str) -> Measured:
    found = _object(value, place, Measured._fields)
    facts, rates, tables = (_object(found[name], f"{place}.{name}") for name in Measured._fields)
    _object(rates, f"{place}.machine", Machine._fields)
    return Measured(
        {name: _text(fact, f"{place}.facts.{name}") for name, fact in facts.items()},
        Machine(
            **{name: _seconds(rate, f"{place}.machine.{name}") for name, rate in rates.items()}
        ),
        {name: _table(rows, f"{place}.tables.{name}", name) for name, rows in tables.items()},
    )


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place} must be a text, not {value!r}")
    return value


def _seconds(value: Any, place: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{place} must be a number of seconds, not {value!r}")
    return float(value)


def _table(value: object, place: str, collective: str) -> tuple[Row, ...]:
    if collective not in SPECS:
        raise ValueError(f"{place}: there is no such collective; known: {', '.join(SPECS)}")
    rows = [
        _row(each, f"{place}[{number}]", collective)
        for number, each in enumerate(_list(value, place, "rows"))
    ]
    limits = [row.largest for row in rows]
    if limits != sorted(set(limits)) or limits[-1] != math.inf:
        raise ValueError(f"{place}: up_to must grow from row to row, and be null in the last")
    return tuple(rows)


def _row(value: object, place: str, collective: str) -> Row:
    found = _object(value, place, ("up_to", "best"))
    largest = found["up_to"]
    if largest is not None and (type(largest) is not int or largest < 0):
        raise ValueError(f"{place}.up_to must be a number of bytes or null, not {largest!r}")
    best = _list(found["best"], f"{place}.best", "algorithms")
    try:
        labels = tuple(parse_label(collective, label).label for label in best)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}.best: {error}") from None
    return Row(math.inf if largest is None else largest, labels)


def _list(value: object, place: str, what: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place} must be a list of {what}, and not empty")
    return value


def _object(value: object, place: str, names: Sequence[str] | None = None) -> dict[str, Any]:
    """An object with exactly these fields, or with any fields if `names` is None."""
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object")
    if names is not None and set(value) != set(names):
        raise ValueError(f"{place} must have {', '.join(names)}, and nothing else")
    return value
