"""What a benchmark finds: times with their spread, bandwidths, and JSON."""

from __future__ import annotations

from statistics import mean
from typing import Any, NamedTuple

from bench.case import BOUND, CALL, JOINS, MEMCPY, PLAN, SPLITS, Case
from bench.copy_rate import least_copied
from bench.samples import Samples
from collectives.schedule.contracts import SPECS
from collectives.selection import select

REFERENCES = (MEMCPY, BOUND)  # lines to compare with, which have no result to check
FORMS = ("out_of_place", "in_place")


class Measurement(NamedTuple):
    """One call: seconds, bandwidths in GB/s, and wrong elements.

    - `seconds`, `low`, `high`: the median of samples and the quartiles around it.
    - `fastest`, `mean`, `slowest`: medians among the ranks.
    - `portbw`: None where the algorithm is not known, or blocks are uneven.
    - `wrong`: None if it was not checked.
    - `of_copy`: the fraction of a device's copy rate that the busiest rank reaches.
    - `noise`: how much the times of one contender differ that was measured twice, as a fraction.
    """

    seconds: float
    low: float
    high: float
    fastest: float
    mean: float
    slowest: float
    samples: int
    algbw: float
    busbw: float
    portbw: float | None
    wrong: int | None
    of_copy: float | None
    noise: float

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a fraction of the median."""
        return (self.high - self.low) / 2 / self.seconds


class Row(NamedTuple):
    """A contender at one size; None for a form, out of place or in place, that it does not have."""

    case: Case
    name: str
    algorithm: str | None
    out_of_place: Measurement | None
    in_place: Measurement | None

    @property
    def first(self) -> Measurement:
        """The form that goes into the summary: out of place, where there is such a form."""
        found = self.out_of_place or self.in_place
        assert found is not None, "a row has at least one form"
        return found

    @property
    def wrong(self) -> int:
        """The wrong elements of both forms."""
        return sum(m.wrong or 0 for m in (self.out_of_place, self.in_place) if m is not None)

    @property
    def label(self) -> str:
        """The name, with the algorithm that the library selected."""
        return f"{self.name}:{self.algorithm}" if self.name in (PLAN, CALL) else self.name


def measurement(
    case: Case,
    name: str,
    algorithm: str | None,
    samples: Samples,
    wrong: int | None,
    *,
    average: int,
    noise: float,
    rate: float | None = None,
) -> Measurement:
    """The bandwidths that follow from a time.

    `average`: see `Samples.over_ranks`.  `rate`: of a copy within the device.
    """
    times = samples.over_ranks(average)
    algbw = case.num_bytes / times.median / 1e9
    return Measurement(
        times.median,
        times.low,
        times.high,
        *_among_ranks(samples),
        samples.number,
        algbw,
        algbw * bus_factor(case.collective, case.size),
        _port_bandwidth(case, algorithm, times.median),
        None if name in REFERENCES else wrong,
        None if rate is None else least_copied(case) / times.median / rate,
        noise,
    )


def _among_ranks(samples: Samples) -> tuple[float, float, float]:
    medians = [rank.median for rank in samples.ranks]
    return min(medians), mean(medians), max(medians)


def bus_factor(collective: str, p: int) -> float:
    """The factor from n / time to the bus bandwidth, for the least possible volume."""
    if collective == "all_reduce":
        return 2 * (p - 1) / p
    return (p - 1) / p if collective in SPLITS | JOINS else 1.0


def _port_bandwidth(case: Case, algorithm: str | None, seconds: float) -> float | None:
    """Bandwidth of the busiest port, at the volume that this algorithm really moves."""
    if algorithm is None or case.counts is not None:
        return None
    chosen = select.choose(
        case.collective, algorithm, case.size, case.num_bytes, topology=case.topology
    )
    busiest = chosen.algorithm.max_bytes_per_rank(p=case.size, n=case.num_bytes, **chosen.options)
    return float(busiest) / seconds / 1e9


def devices_text(number: int) -> str:
    """A number of devices as text."""
    return "one device" if number == 1 else f"{number} devices"


def op_and_root(case: Case) -> tuple[str, int]:
    """As nccl-tests prints them where there is none: "none" and -1."""
    spec = SPECS[case.collective]
    return case.op if spec.is_reduction else "none", case.root if spec.is_rooted else -1


def us(seconds: float | None) -> str:
    """Seconds as text, in microseconds."""
    return "-" if seconds is None else f"{seconds * 1e6:.2f}"


def percent(fraction: float) -> str:
    """A spread as text, in percent."""
    return f"{fraction * 100:.1f}" if fraction < 10 else ">999"


def times_faster(ratio: float | None) -> str:
    """A ratio as text."""
    return "-" if ratio is None else f"{ratio:.2f}"


def row_dict(row: Row) -> dict[str, Any]:
    """A row for JSON."""
    op, root = op_and_root(row.case)
    forms = {name: getattr(row, name) for name in FORMS}
    return {
        "collective": row.case.collective,
        "size": row.case.num_bytes,
        "count": row.case.num_elements,
        "dtype": row.case.dtype.name,
        "op": op,
        "root": root,
        "name": row.name,
        "algorithm": row.algorithm,
        **{name: found and found._asdict() for name, found in forms.items()},
    }
