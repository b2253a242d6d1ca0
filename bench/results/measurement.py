"""What a benchmark finds: times with their spread, bandwidths, and JSON."""

from __future__ import annotations

from statistics import mean
from typing import Any, NamedTuple

from bench.contenders.contender import BOUND, CALL, MEMCPY, PLAN
from bench.timing.quartiles import Samples
from bench.workloads.collective import JOINS, SPLITS, Case
from collectives.schedule.contracts import SPECS
from collectives.selection import select

REFERENCES = (MEMCPY, BOUND)  # lines to compare with, which have no result to check
FORMS = ("out_of_place", "in_place")


class Measurement(NamedTuple):
    """One call: seconds, bandwidths in GB/s, and wrong elements."""

    seconds: float  # the median of samples
    low: float  # and the quartiles around it
    high: float
    fastest: float  # medians among the ranks
    mean: float
    slowest: float
    samples: int
    algbw: float
    busbw: float
    portbw: float | None  # None where the algorithm is not known, or blocks are uneven
    wrong: int | None  # None if it was not checked
    of_copy: float | None  # of a device's copy rate, what the busiest rank reaches
    noise: float  # how much the times of one contender differ that was measured twice

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
        form = self.out_of_place or self.in_place
        assert form is not None, "a row has at least one form"
        return form

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
    """Return the bandwidths that follow from a time.

    `Samples.over_ranks` explains `average`; `rate` is that of a copy within the device.
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
    """Return the factor from n / time to the bus bandwidth, for the least possible volume."""
    if collective == "all_reduce":
        return 2 * (p - 1) / p
    return (p - 1) / p if collective in SPLITS | JOINS else 1.0


def _port_bandwidth(case: Case, algorithm: str | None, seconds: float) -> float | None:
    """Return the bandwidth of the busiest port, at the volume that this algorithm really moves."""
    if algorithm is None or case.counts is not None:
        return None
    chosen = select.choose(
        case.collective, algorithm, case.size, case.num_bytes, topology=case.topology
    )
    busiest = chosen.algorithm.max_bytes_per_rank(p=case.size, n=case.num_bytes, **chosen.options)
    return float(busiest) / seconds / 1e9


def least_copied(case: Case) -> float:
    """Return a copy of so many bytes reads and writes as many as the busiest rank of a call must.

    A rank reads its input and writes its result, once each.
    """
    return max(_moved(case._replace(rank=rank)) for rank in range(case.size)) / 2


def _moved(case: Case) -> int:
    read, written = sum(case.in_counts), sum(case.out_counts)
    is_there = case.collective == "broadcast" and read > 0  # the root's result is its input
    return (read if is_there else read + written) * case.dtype.itemsize


def devices_text(number: int) -> str:
    """Return a number of devices as text."""
    return "one device" if number == 1 else f"{number} devices"


def op_and_root(case: Case) -> tuple[str, int]:
    """Return the operator and the root, as nccl-tests "none" and -1 where there is none."""
    spec = SPECS[case.collective]
    return case.op if spec.is_reduction else "none", case.root if spec.is_rooted else -1


def us(seconds: float | None) -> float | str:
    """Return seconds in microseconds, for a column of numbers; "-" if there are none."""
    return "-" if seconds is None else seconds * 1e6


def percent(fraction: float) -> str:
    """Return a spread as text, in percent."""
    return f"{fraction * 100:.1f}" if fraction < 10 else ">999"


def times_faster(ratio: float | None) -> str:
    """Return a ratio as text."""
    return "-" if ratio is None else f"{ratio:.2f}"


def row_dict(row: Row) -> dict[str, Any]:
    """Return a row for JSON."""
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
        **{name: measurement and measurement._asdict() for name, measurement in forms.items()},
    }
