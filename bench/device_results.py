"""Results of collectives on devices: what was fastest, and lines of tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench import sizes

STAGED, DEFAULT, THROUGH_HOST = "staged", "default", "get, MPI, set"  # contenders
COPY = "copy"
HEADS = ("staged us", "auto us", "best of auto us", f"{THROUGH_HOST} us", f"{COPY} us")


class DeviceCase(NamedTuple):
    """One collective at one size: seconds and wrong elements of each contender.

    - `size`: bytes of the whole vector.
    - `chosen`: the algorithm that the library selects, which `STAGED` and `DEFAULT` use.
    - `copied`: bytes of the copy in `copy_seconds`; see `bytes_to_copy`.
    """

    collective: str
    size: int
    chosen: str
    seconds: Mapping[str, float]
    wrong: Mapping[str, int]
    copied: int
    copy_seconds: float

    @property
    def best(self) -> tuple[str, float]:
        """The fastest algorithm with which devices read each other's memory, and its seconds."""
        others = {STAGED, THROUGH_HOST}
        found = {name: took for name, took in self.seconds.items() if name not in others}
        name = min(found, key=found.__getitem__)
        return self.chosen if name == DEFAULT else name, found[name]

    @property
    def cells(self) -> list[str]:
        """Of a line of a table: the case, and microseconds."""
        name, took = self.best
        seconds = self.seconds
        return [
            self.collective,
            sizes.text(self.size),
            short(seconds[STAGED]),
            short(seconds[DEFAULT]),
            f"{short(took)} ({name})",
            short(seconds[THROUGH_HOST]),
            short(self.copy_seconds),
        ]


def bytes_to_copy(collective: str, num_ranks: int, num_bytes: int) -> int:
    """A copy of so many bytes reads and writes as much as all ranks together must, of one device.

    Each input is read once and each result is written once; a broadcast is in place.
    """
    parts_in = {"all_gather": 1, "broadcast": 1}.get(collective, num_ranks)
    parts_out = {"reduce_scatter": 1, "broadcast": num_ranks - 1}.get(collective, num_ranks)
    return (parts_in + parts_out) * num_bytes // 2


def short(seconds: float) -> str:
    """Microseconds with about three digits."""
    us = seconds * 1e6
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def is_result(found: Mapping[str, Any]) -> bool:
    """Whether a step wrote a table of collectives on devices."""
    return "device_cases" in found


def cases_of(found: Mapping[str, Any]) -> Iterator[DeviceCase]:
    """The cases that a job wrote as JSON."""
    for case in found["device_cases"]:
        yield DeviceCase(**{name: case[name] for name in DeviceCase._fields})


def title(found: Mapping[str, Any]) -> str:
    """What was measured, in a line."""
    mps = "with MPS" if found["mps"] else "without MPS"
    how = "" if found["links"] == "peer" else f"; staged all the same: {found['links']}"
    return f"{found['ranks']} ranks on {found['devices']}, {mps}{how}"


def as_dict(facts: Mapping[str, Any], cases: Sequence[DeviceCase]) -> dict[str, Any]:
    """For JSON."""
    return {**facts, "device_cases": [case._asdict() for case in cases]}
