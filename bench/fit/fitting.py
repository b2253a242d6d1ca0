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

from bench.fit.patterns import Sample, predicted
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
    """The links of one class, in the order of their sizes.

    `eager_limit`: the bytes above which a send waits for its receive; None: it never does.  Within
    both kinds sizes are divided where times bend.  `base`: the other costs: of a copy, and of a
    call, in addition to its operations.  Raises ValueError if no machine has such times.
    """
    limit = math.inf if eager_limit is None else eager_limit
    _refuse_nonsense(samples)
    trips = {
        each.num_bytes: max(each.seconds - base.call_seconds, each.seconds / 4) / 2
        for each in samples
        if each.pattern == "ping-pong"
    }
    refuse_few(samples, eager_limit)
    samples = [each for each in samples if each.num_bytes in trips]
    eager = divided([each for each in samples if each.num_bytes <= limit])
    late = divided([each for each in samples if each.num_bytes > limit])
    groups = [*eager, *late]
    links = []
    for number, sizes in enumerate(groups):
        is_rendezvous = number >= len(eager)
        is_last_eager = number == len(eager) - 1
        up_to = limit if is_last_eager else _between(sizes, groups[number + 1 : number + 2])
        start = _start({size: trips[size] for size in sizes}, up_to, is_rendezvous=is_rendezvous)
        of_link = [each for each in samples if each.num_bytes in sizes]
        links.append(fitted_link(of_link, start, base))
        _refuse_bad_fit(of_link, links[-1], base)
    return tuple(links)


def undisturbed(samples: Sequence[Sample]) -> list[Sample]:
    """The quiet samples of a pattern.  Raises ValueError if most are not."""
    quiet = [each for each in samples if each.is_quiet]
    if 2 * len(quiet) < len(samples):
        raise ValueError(
            f"ranks lost their cores in nearly every {samples[0].pattern} on"
            f" {samples[0].link_class} ({len(samples) - len(quiet)} of {len(samples)} sizes):"
            " other programs use this machine; repeat the measurement when it is idle"
        )
    return quiet


def refuse_few(samples: Sequence[Sample], eager_limit: int | None) -> None:
    """Raise ValueError if ping-pongs of too few sizes are left, below or above `eager_limit`."""
    limit = math.inf if eager_limit is None else eager_limit
    sizes = [each.num_bytes for each in samples if each.pattern == "ping-pong"]
    few = [
        name
        for name, number in (
            (f"up to {limit:g}", sum(size <= limit for size in sizes)),
            (
                f"above {limit:g}",
                FEWEST if limit == math.inf else sum(size > limit for size in sizes),
            ),
        )
        if number < FEWEST
    ]
    if few:
        raise ValueError(
            f"too few messages {few[0]} bytes on {samples[0].link_class} could be measured while no"
            " rank lost its core: repeat the measurement when the machine is idle"
        )


def _refuse_nonsense(samples: Sequence[Sample]) -> None:
    """Raise ValueError for times that no machine has."""
    for each in samples:
        if not 0 < each.seconds < math.inf:
            raise ValueError(f"{_named(each)} took {each.seconds} seconds, which is no time")
    if not samples:
        raise ValueError("there are no samples to fit a link to")
    name = samples[0].link_class
    for pattern in {each.pattern for each in samples}:
        times = [each for each in samples if each.pattern == pattern]
        low, high = (pick(times, key=lambda each: each.num_bytes) for pick in (min, max))
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
    """The limit between the sizes of a link and those of the next."""
    return math.isqrt(sizes[-1] * following[0][0]) if following else math.inf


def divided(samples: Sequence[Sample]) -> list[list[int]]:
    """Sizes in groups, each of which has times near straight lines, in the mean over the patterns.

    If one group of all sizes is not straight enough, there are `MOST` groups of at least `FEWEST`
    sizes, or as many as there are sizes for.
    """
    times: dict[str, dict[int, float]] = {}
    for each in samples:
        times.setdefault(each.pattern, {})[each.num_bytes] = each.seconds

    def worst(groups: Sequence[Sequence[int]]) -> float:
        return max(fmean(bend(group, each) for each in times.values()) for group in groups)

    sizes = sorted({each.num_bytes for each in samples})
    number = min(MOST, len(sizes) // FEWEST)
    if number < 2 or worst([sizes]) <= CURVED:
        return [sizes] if sizes else []
    return min(_ways(sizes, number), key=worst)


def _ways(sizes: Sequence[int], number: int) -> Iterator[list[list[int]]]:
    """All ways to divide sizes into so many groups."""
    for ends in combinations(range(FEWEST, len(sizes)), number - 1):
        groups = [list(sizes[begin:end]) for begin, end in pairwise((0, *ends, len(sizes)))]
        if min(map(len, groups)) >= FEWEST:
            yield groups


def bend(sizes: Sequence[int], times: Mapping[int, float]) -> float:
    """The mean relative error of the best straight line through the times of these sizes."""
    found = [size for size in sizes if size in times]
    if not found:
        return 0.0
    base, slope = line(found, [times[size] for size in found])
    return fmean(abs((base + slope * size) / times[size] - 1) for size in found)


def line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds at 0 bytes and per byte, neither negative, by relative errors."""
    x, y = np.array(sizes, float), np.array(seconds)
    relative = np.stack([1 / y, x / y], axis=1)
    base, slope = np.linalg.lstsq(relative, np.ones(len(y)), rcond=None)[0]
    if base < 0:
        return 0.0, float(np.sum(x / y) / np.sum((x / y) ** 2))
    if slope < 0:
        return float(np.sum(1 / y) / np.sum((1 / y) ** 2)), 0.0
    return float(base), float(slope)


def _start(trips: dict[int, float], up_to: float, *, is_rendezvous: bool) -> Link:
    """A link that explains the ping-pong alone, from which the fit begins."""
    base, slope = line(list(trips), list(trips.values()))
    base, slope = max(base, 1e-9), max(slope, 1e-13)
    return Link(up_to, base / 4, slope / 10, base / 2, base / 4, slope, is_rendezvous)


def fitted_link(samples: Sequence[Sample], start: Link, base: Machine) -> Link:
    """The link that predicts the samples best."""
    costs = np.log([getattr(start, name) for name in _COSTS])

    def link(logs: Floats) -> Link:
        return start._replace(**dict(zip(_COSTS, np.exp(logs).tolist(), strict=True)))

    def errors(logs: Floats) -> Floats:
        prior = _PRIOR * (logs - costs)  # decides only what the samples leave open
        return np.concatenate([link_errors(samples, link(logs), base), prior])

    return link(least_errors(errors, costs))


def link_errors(samples: Sequence[Sample], link: Link, base: Machine) -> Floats:
    """The logarithms of predicted over measured seconds."""
    links = {each.link_class: (link._replace(up_to_bytes=math.inf),) for each in samples}
    machine = base._replace(links=links)
    seconds = [each.seconds for each in samples]
    return np.asarray(np.log(predicted(samples, machine) / seconds))


def least_errors(errors: Callable[[Floats], Floats], start: Floats) -> Floats:
    """The arguments with the least sum of Huber's losses, by Levenberg's and Marquardt's method."""
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
    """Arguments with smaller errors, if a step finds some, and the damping of the next step."""
    found = errors(at)
    shifts = _DIFFERENCE * np.eye(len(at))
    slopes = np.stack([(errors(at + each) - found) / _DIFFERENCE for each in shifts], axis=1)
    weights = np.minimum(1, HUBER / np.maximum(np.abs(found), 1e-12))
    normal, gradient = slopes.T @ (weights[:, None] * slopes), slopes.T @ (weights * found)
    while damping < _MOST_DAMPING:
        step = -np.linalg.solve(normal + damping * np.eye(len(at)), gradient)
        tried: Floats = at + step.clip(-1, 1)
        if loss(errors(tried)) < loss(found):
            return tried, damping / 10
        damping *= 10
    return at, damping


def loss(errors: Floats) -> float:
    """The sum of Huber's losses."""
    size = np.abs(errors)
    return float(np.sum(np.where(size <= HUBER, size**2, HUBER * (2 * size - HUBER))))


def rate(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds per byte of a copy or combination, which has no other costs: the median."""
    return float(np.median(np.array(seconds) / np.array(sizes)))
