"""Fits a machine to samples: the costs with which the simulator predicts them best.

Errors are relative: the logarithm of predicted over measured seconds.  A deviation counts by its
square up to a tenth, and linearly beyond it (Huber), so that disturbed samples decide little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from bench.choosing.patterns import Sample, predicted
from collectives.simulation import Link, Machine

Floats = NDArray[np.float64]

HUBER = 0.1  # the relative error from which on samples count linearly
CURVED = 0.05  # the relative error of a straight line from which on its sizes are divided
FEWEST, MOST = 3, 3  # sizes of a link, at least; links of either kind of message, at most
LIMIT = 0.5  # the median relative error above which times are no machine's
_STEPS, _PROGRESS, _MOST_DAMPING = 20, 1e-4, 1e6  # when the search ends
_PRIOR, _DIFFERENCE = 1e-2, 1e-3  # the weight of the start, and the shifts for slopes
# The costs of a `Link` that are fitted.
_COSTS = (
    "overhead_seconds",
    "latency_seconds",
    "gap_seconds",
    "seconds_per_byte",
    "overhead_seconds_per_byte",
)


def fitted_links(
    samples: Sequence[Sample], eager_limit: int | None, base: Machine
) -> tuple[Link, ...]:
    """Return the links of one class, in the order of their sizes.

    Below and above the eager limit sizes are divided where times bend.

    Parameters
    ----------
    samples : sequence of Sample
        The times of all patterns on this class of links.
    eager_limit : int or None
        The bytes above which a send waits for its receive; None: it never does.
    base : Machine
        The other costs: of a copy, and of a call in addition to its operations.

    Raises
    ------
    ValueError
        If no machine has such times.
    """
    limit = math.inf if eager_limit is None else eager_limit
    _refuse_nonsense(samples)
    trips = {
        sample.num_bytes: max(sample.seconds - base.call_seconds, sample.seconds / 4) / 2
        for sample in samples
        if sample.pattern == "ping-pong"
    }
    refuse_few(samples, eager_limit)
    samples = [sample for sample in samples if sample.num_bytes in trips]
    eager = divided([sample for sample in samples if sample.num_bytes <= limit])
    late = divided([sample for sample in samples if sample.num_bytes > limit])
    groups = [*eager, *late]
    links = []
    for number, sizes in enumerate(groups):
        is_rendezvous = number >= len(eager)
        is_last_eager = number == len(eager) - 1
        up_to = limit if is_last_eager else _between(sizes, groups[number + 1 : number + 2])
        start = _start({size: trips[size] for size in sizes}, up_to, is_rendezvous=is_rendezvous)
        of_link = [sample for sample in samples if sample.num_bytes in sizes]
        links.append(fitted_link(of_link, start, base))
        _refuse_bad_fit(of_link, links[-1], base)
    return tuple(links)


def undisturbed(samples: Sequence[Sample]) -> list[Sample]:
    """Return the quiet samples of a pattern; raise ValueError if most are not."""
    quiet = [sample for sample in samples if sample.is_quiet]
    if 2 * len(quiet) < len(samples):
        raise ValueError(
            f"ranks lost their cores in nearly every {samples[0].pattern} on"
            f" {samples[0].link_class} ({len(samples) - len(quiet)} of {len(samples)} sizes):"
            " other programs use this machine; repeat the measurement when it is idle"
        )
    return quiet


def refuse_few(samples: Sequence[Sample], eager_limit: int | None) -> None:
    """Raise ValueError if ping-pongs of too few sizes are left, below or above `eager_limit`."""
    sizes = [sample.num_bytes for sample in samples if sample.pattern == "ping-pong"]
    if eager_limit is None:
        counts = {"": len(sizes)}
    else:
        num_eager = sum(size <= eager_limit for size in sizes)
        counts = {
            f" up to {eager_limit} bytes": num_eager,
            f" above {eager_limit} bytes": len(sizes) - num_eager,
        }
    few = [which for which, number in counts.items() if number < FEWEST]
    if few:
        raise ValueError(
            f"too few messages{few[0]} on {samples[0].link_class} could be measured while no"
            " rank lost its core: repeat the measurement when the machine is idle"
        )


def _refuse_nonsense(samples: Sequence[Sample]) -> None:
    """Raise ValueError for times that no machine has."""
    for sample in samples:
        if not 0 < sample.seconds < math.inf:
            raise ValueError(f"{_named(sample)} took {sample.seconds} seconds, which is no time")
    if not samples:
        raise ValueError("there are no samples to fit a link to")
    name = samples[0].link_class
    for pattern in {sample.pattern for sample in samples}:
        times = [sample for sample in samples if sample.pattern == pattern]
        low, high = (pick(times, key=lambda sample: sample.num_bytes) for pick in (min, max))
        if high.num_bytes > 100 * low.num_bytes and high.seconds <= low.seconds:
            raise ValueError(
                f"{_named(high)} took no longer than of {low.num_bytes} bytes on {name}: "
                "the measurement was disturbed; repeat it"
            )


def _refuse_bad_fit(samples: Sequence[Sample], link: Link, base: Machine) -> None:
    """Raise ValueError if the best link is a bad one."""
    error = float(np.median(np.abs(np.expm1(link_errors(samples, link, base)))))
    if error > LIMIT:
        raise ValueError(
            f"no link has the times measured on {samples[0].link_class} up to "
            f"{samples[-1].num_bytes} bytes (median error {error:.0%}): repeat the measurement"
        )


def _named(sample: Sample) -> str:
    return f"{sample.pattern} of {sample.num_bytes} bytes"


def _between(sizes: Sequence[int], following: Sequence[Sequence[int]]) -> float:
    """Return the limit between the sizes of a link and the sizes of the next."""
    return math.isqrt(sizes[-1] * following[0][0]) if following else math.inf


def divided(samples: Sequence[Sample]) -> list[list[int]]:
    """Divide sizes into groups, each with times near a straight line, in the mean over patterns.

    If one group of all sizes is not straight enough, there are `MOST` groups of at least `FEWEST`
    sizes, or as many as there are sizes for.
    """
    times: dict[str, dict[int, float]] = {}
    for sample in samples:
        times.setdefault(sample.pattern, {})[sample.num_bytes] = sample.seconds

    def worst(groups: Sequence[Sequence[int]]) -> float:
        return max(fmean(bend(group, curve) for curve in times.values()) for group in groups)

    sizes = sorted({sample.num_bytes for sample in samples})
    number = min(MOST, len(sizes) // FEWEST)
    if number < 2 or worst([sizes]) <= CURVED:
        return [sizes] if sizes else []
    return min(_ways(sizes, number), key=worst)


def _ways(sizes: Sequence[int], number: int) -> Iterator[list[list[int]]]:
    """Yield all ways to divide sizes into so many groups."""
    for ends in combinations(range(FEWEST, len(sizes)), number - 1):
        groups = [list(sizes[begin:end]) for begin, end in pairwise((0, *ends, len(sizes)))]
        if min(map(len, groups)) >= FEWEST:
            yield groups


def bend(sizes: Sequence[int], times: Mapping[int, float]) -> float:
    """Return the mean relative error of the best straight line through the times of these sizes."""
    measured = [size for size in sizes if size in times]
    if not measured:
        return 0.0
    base, slope = line(measured, [times[size] for size in measured])
    return fmean(abs((base + slope * size) / times[size] - 1) for size in measured)


def line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return seconds at 0 bytes and per byte, neither negative, by relative errors."""
    x, y = np.array(sizes, float), np.array(seconds)
    relative = np.stack([1 / y, x / y], axis=1)
    base, slope = np.linalg.lstsq(relative, np.ones(len(y)), rcond=None)[0]
    if base < 0:
        return 0.0, float(np.sum(x / y) / np.sum((x / y) ** 2))
    if slope < 0:
        return float(np.sum(1 / y) / np.sum((1 / y) ** 2)), 0.0
    return float(base), float(slope)


def _start(trips: dict[int, float], up_to: float, *, is_rendezvous: bool) -> Link:
    """Return a link that explains the ping-pong alone, from which the fit begins."""
    base, slope = line(list(trips), list(trips.values()))
    base, slope = max(base, 1e-9), max(slope, 1e-13)
    return Link(up_to, base / 4, slope / 10, base / 2, base / 4, slope, is_rendezvous)


def fitted_link(samples: Sequence[Sample], start: Link, base: Machine) -> Link:
    """Return the link that predicts the samples best."""
    costs = np.log([getattr(start, name) for name in _COSTS])

    def link(logs: Floats) -> Link:
        return start._replace(**dict(zip(_COSTS, np.exp(logs).tolist(), strict=True)))

    def errors(logs: Floats) -> Floats:
        prior = _PRIOR * (logs - costs)  # decides only what the samples leave open
        return np.concatenate([link_errors(samples, link(logs), base), prior])

    return link(least_errors(errors, costs))


def link_errors(samples: Sequence[Sample], link: Link, base: Machine) -> Floats:
    """Return the logarithms of predicted over measured seconds."""
    links = {sample.link_class: (link._replace(up_to_bytes=math.inf),) for sample in samples}
    machine = base._replace(links=links)
    seconds = [sample.seconds for sample in samples]
    return np.asarray(np.log(predicted(samples, machine) / seconds))


def least_errors(errors: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Return the arguments with the least sum of losses, by Levenberg's and Marquardt's method."""
    at, damping = start, 1e-2
    for _ in range(_STEPS):
        before = loss(errors(at))
        at, damping = _improved(errors, at, damping)
        if before - loss(errors(at)) < _PROGRESS * before:
            break
    return at


def _improved(
    errors: Callable[[Floats], Floats], at: Floats, damping: float
) -> tuple[Floats, float]:
    """Return arguments with smaller errors, if a step finds some, and the next step's damping."""
    before = errors(at)
    shifts = _DIFFERENCE * np.eye(len(at))
    slopes = np.stack([(errors(at + shift) - before) / _DIFFERENCE for shift in shifts], axis=1)
    weights = np.minimum(1, HUBER / np.maximum(np.abs(before), 1e-12))
    normal, gradient = slopes.T @ (weights[:, None] * slopes), slopes.T @ (weights * before)
    while damping < _MOST_DAMPING:
        step = -np.linalg.solve(normal + damping * np.eye(len(at)), gradient)
        tried: Floats = at + step.clip(-1, 1)
        if loss(errors(tried)) < loss(before):
            return tried, damping / 10
        damping *= 10
    return at, damping


def loss(errors: Floats) -> float:
    """Return the sum of Huber's losses."""
    size = np.abs(errors)
    return float(np.sum(np.where(size <= HUBER, size**2, HUBER * (2 * size - HUBER))))


def rate(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return seconds per byte of a copy or combination, which costs nothing else: the median."""
    return float(np.median(np.array(seconds) / np.array(sizes)))
