"""The quantities that goals bound: ratios, differences, times and shares, computed from seconds.

A measure is a function of one case.  It names the contenders that it needs, and formats a value, a
bound and a shortfall as text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from bench.case import GLOO, MEMCPY, NATIVE
from bench.limit import Limit
from bench.timed import Timed

# The contenders of an all-reduce that is overlapped with something else.
ALONE, BESIDE, IN_TURN, AT_ONCE = "all-reduce", "beside", "in turn", "at once"


@dataclass(frozen=True)
class Measure(ABC):
    """`ours`: the contender that is judged.  `wants_more`: the bound is a least value."""

    ours: str
    wants_more: ClassVar[bool] = True

    @property
    @abstractmethod
    def contenders(self) -> tuple[str, ...]:
        """Who must be timed side by side."""

    @property
    @abstractmethod
    def words(self) -> str:
        """What the value is, for a reader who knows no bound."""

    @abstractmethod
    def of(self, timed: Timed) -> float:
        """The value."""

    @abstractmethod
    def target(self, bound: float) -> str:
        """The bound, as text."""

    @abstractmethod
    def text(self, value: float) -> str:
        """A value as text."""

    @abstractmethod
    def shortfall(self, value: float, bound: float) -> str:
        """By how much a value misses the bound, as text."""

    def meets(self, value: float, bound: float) -> bool:
        """Whether the value is as good as the bound or better."""
        return value >= bound if self.wants_more else value <= bound


@dataclass(frozen=True)
class Ratio(Measure):
    """The rival's time over ours: above 1 ours is faster."""

    rival: str = NATIVE

    @property
    def words(self) -> str:
        return f"times faster than {'Gloo' if self.rival == GLOO else 'the MPI library'}"

    @property
    def contenders(self) -> tuple[str, ...]:
        return self.rival, self.ours

    def of(self, timed: Timed) -> float:
        return timed.seconds[self.rival] / timed.seconds[self.ours]

    def target(self, bound: float) -> str:
        return "not slower" if bound == 1 else f"at least {bound:g}x faster"

    def text(self, value: float) -> str:
        return f"{value:.3f}"

    def shortfall(self, value: float, bound: float) -> str:
        return f"{1 - value / bound:.1%}"


class InMicroseconds(Measure):
    """Measures that are times."""

    wants_more: ClassVar[bool] = False

    def text(self, value: float) -> str:
        return f"{value * 1e6:.2f} us"

    def shortfall(self, value: float, bound: float) -> str:
        return self.text(value - bound)


@dataclass(frozen=True)
class Seconds(InMicroseconds):
    """The time of ours itself."""

    @property
    def words(self) -> str:
        return "time"

    @property
    def contenders(self) -> tuple[str, ...]:
        return (self.ours,)

    def of(self, timed: Timed) -> float:
        return timed.seconds[self.ours]

    def target(self, bound: float) -> str:
        return f"at most {bound * 1e6:g} us"


@dataclass(frozen=True)
class Excess(InMicroseconds):
    """How much longer ours takes than `base`."""

    base: str

    @property
    def words(self) -> str:
        return f"more than the {self.base}"

    @property
    def contenders(self) -> tuple[str, ...]:
        return self.base, self.ours

    def of(self, timed: Timed) -> float:
        return timed.seconds[self.ours] - timed.seconds[self.base]

    def target(self, bound: float) -> str:
        return f"at most {bound * 1e6:g} us above the {self.base}"


class AsShare(Measure):
    """Measures that are fractions."""

    def text(self, value: float) -> str:
        return f"{value:.1%}"

    def shortfall(self, value: float, bound: float) -> str:
        return f"{abs(value - bound) * 100:.1f} percentage points"


@dataclass(frozen=True)
class RelativeExcess(AsShare):
    """How much longer ours takes than `base`, as a fraction of the time of `base`."""

    base: str
    wants_more: ClassVar[bool] = False

    @property
    def words(self) -> str:
        return f"more than the {self.base}"

    @property
    def contenders(self) -> tuple[str, ...]:
        return self.base, self.ours

    def of(self, timed: Timed) -> float:
        return timed.seconds[self.ours] / timed.seconds[self.base] - 1

    def target(self, bound: float) -> str:
        return f"at most {bound:.0%} above the {self.base}"


@dataclass(frozen=True)
class MemoryRate(AsShare):
    """The rate at which an all-reduce moves its bytes, as a fraction of the rate of a copy."""

    ranks: int

    @property
    def words(self) -> str:
        return "of the rate of a copy in memory"

    @property
    def contenders(self) -> tuple[str, ...]:
        return MEMCPY, self.ours

    def of(self, timed: Timed) -> float:
        return Limit(self.ranks, timed).seconds / timed.seconds[self.ours]

    def target(self, bound: float) -> str:
        return f"at least {bound:.0%} of the rate of a copy"


@dataclass(frozen=True)
class Hidden(AsShare):
    """The fraction of an all-reduce that is hidden beside something else."""

    ours: str = AT_ONCE

    @property
    def words(self) -> str:
        return "of the all-reduce hidden"

    @property
    def contenders(self) -> tuple[str, ...]:
        return ALONE, IN_TURN, self.ours

    def of(self, timed: Timed) -> float:
        saved = timed.seconds[IN_TURN] - timed.seconds[self.ours]
        return saved / timed.seconds[ALONE]

    def target(self, bound: float) -> str:
        return f"at least {bound:.0%} hidden"
