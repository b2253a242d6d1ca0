"""The limit of a large all-reduce: how fast memory moves the bytes that must be moved.

A copy of the buffer on all ranks at once, which reads and writes every byte once, measures the
speed of the memory.  No all-reduce can move fewer bytes, because every rank must read its input and
write its result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bench.contenders.contender import CALL, MEMCPY, PLAN
from bench.speed.timed_case import Timed
from bench.workloads.sizes import text
from collectives.selection import select


class Limit(NamedTuple):
    """The limit of an all-reduce on so many ranks that was timed beside a copy."""

    ranks: int
    timed: Timed

    @property
    def least(self) -> int:
        """Bytes that all ranks together must read and write: those of the copy."""
        return 2 * self.ranks * self.timed.size

    @property
    def bandwidth(self) -> float:
        """Bytes per second that memory moves for all ranks together."""
        return self.least / self.timed.seconds[MEMCPY]

    @property
    def moved(self) -> int:
        """Bytes that all ranks read and write, if caches hold what has just arrived, and no more.

        What is sent is read.  What arrives is written; or it is combined at once, and then what it
        is combined with is read, and the result written.
        """
        size = self.timed.size
        chosen = select.choose("all_reduce", self.timed.algorithm, self.ranks, size)
        cost: dict[str, Any] = {"p": self.ranks, "n": size, **chosen.options}
        sent = chosen.algorithm.total_bytes(**cost)
        combined = chosen.algorithm.reduction_bytes(**cost)
        return int(2 * sent + self.ranks * combined)

    @property
    def seconds(self) -> float:
        """What moving these takes."""
        return self.moved / self.bandwidth

    def lines(self) -> list[str]:
        """Return the arithmetic as text."""
        copy, plan, call = (
            f"{self.timed.seconds[name] * 1e3:.2f} ms" for name in (MEMCPY, PLAN, CALL)
        )
        least, moved = (f"{count / 1e6:.1f} MB" for count in (self.least, self.moved))
        return [
            f"What limits the all-reduce of {text(self.timed.size)} on {self.ranks} ranks:",
            f"- A copy of the buffer on all ranks at once reads and writes {least} in {copy}, "
            f"{self.bandwidth / 1e9:.1f} GB/s.",
            "- No all-reduce moves less, for every rank reads its input and writes its result.",
            f"- {self.timed.algorithm} moves {moved}, which at that rate take "
            f"{self.seconds * 1e3:.2f} ms; less where a cache still holds what is read.",
            f"- It took {plan} by plan and {call} by call.",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return bytes, bytes per second and seconds, for JSON."""
        return {name: getattr(self, name) for name in ("least", "bandwidth", "moved", "seconds")}
