"""Times calls: contenders side by side in random order, medians and quartiles of samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from bench.timing.attempt import Attempt, called
from bench.timing.fresh_arrays import Fresh
from bench.timing.quartiles import Quartiles, Samples
from collectives.arrays.backends import Array, backend_of

SMALL = 64 << 10  # bytes below which the calls are too short to be timed one by one
BLOCK_CALLS = 40  # calls that are timed together then
FEWEST = 3  # samples that are taken however long they take

Run = Callable[[], Any]


class Effort(NamedTuple):
    """Calls before, samples of each contender, and seconds after which fewer samples must do.

    A sample is of so many `calls` where these are small, else of `large_calls`.
    """

    warmup: int
    samples: int
    seconds: float
    calls: int = BLOCK_CALLS
    large_calls: int = 1


def _nothing() -> None:
    """End the calls of a sample on the host: they have ended."""


def times(
    runs: Sequence[Run],
    x: Array | None,
    *,
    is_small: bool,
    effort: Effort,
    end: Callable[[], object] = _nothing,
) -> list[float]:
    """Return the seconds of a call of each of `runs`: the median of the slowest rank.

    See `sampled`.
    """
    taken = sampled(runs, x, is_small=is_small, effort=effort, end=end)
    return [samples.slowest for samples in taken]


def sampled(
    runs: Sequence[Run],
    x: Array | None,
    *,
    is_small: bool,
    effort: Effort,
    end: Callable[[], object] = _nothing,
) -> list[Samples]:
    """Return what each of `runs` took, which all read `x`: the same on every rank.

    The function `end` waits until all calls of a sample are complete, those on a device too.
    """
    attempts = [called] * len(runs)
    taken = raced(runs, attempts, x, is_small=is_small, effort=effort, end=end)
    return [samples for samples in taken if samples is not None]


def raced(
    runs: Sequence[Run],
    attempts: Sequence[Attempt],
    x: Array | None,
    *,
    is_small: bool,
    effort: Effort,
    end: Callable[[], object],
) -> list[Samples | None]:
    """Return what `sampled` does, each sample taken in an attempt; None of who has failed.

    The contenders take turns, so that whatever else the machine does meets all of them, and in
    another order every time, because each finds the caches as the one before has left them.
    """
    calls = effort.calls if is_small else effort.large_calls
    taken: dict[int, list[float]] = {turn: [] for turn in range(len(runs))}
    turns, shuffle = list(taken), Random(0).shuffle  # the same on every rank

    def let_take(turn: int, calls: int) -> None:
        if turn in taken:
            took = attempts[turn](partial(_sample, runs[turn], x, calls, end))
            if took is None:
                del taken[turn]
            else:
                taken[turn].append(took)

    for _ in range(effort.warmup):
        for turn in turns:
            let_take(turn, 1)
    for samples in taken.values():
        samples.clear()
    for _ in _rounds(effort):
        shuffle(turns)
        for turn in turns:
            let_take(turn, calls)
    samples_of = dict(zip(taken, _gathered(list(taken.values())), strict=True))
    return [samples_of.get(turn) for turn in range(len(runs))]


def _gathered(taken: Sequence[Sequence[float]]) -> list[Samples]:
    """Return the quartiles of all ranks, from the samples of this one of each contender."""
    mine = np.percentile(np.array(taken), [25, 50, 75], axis=1).T
    ranks = np.empty((MPI.COMM_WORLD.size, *mine.shape))
    MPI.COMM_WORLD.Allgather(np.ascontiguousarray(mine), ranks)
    number = len(taken[0])
    return [
        Samples(tuple(Quartiles(*map(float, rank)) for rank in contender), number)
        for contender in ranks.transpose(1, 0, 2)
    ]


def _rounds(effort: Effort) -> Iterator[int]:
    """Yield as many rounds as samples are wanted, but no new one when the time is up on rank 0."""
    end = time.perf_counter() + effort.seconds
    for number in range(effort.samples):
        if number >= FEWEST and not MPI.COMM_WORLD.bcast(time.perf_counter() < end):
            return
        yield number


def _sample(run: Run, x: Array | None, calls: int, end: Callable[[], object]) -> float:
    """Return seconds of a call: of a large one alone, of a small one in the mean over many."""
    if calls == 1:
        return _single(run, x, end)
    return block_of_calls(run, x, calls, end)


def block_of_calls(run: Run, x: Array | None, calls: int, end: Callable[[], object]) -> float:
    """Time many calls, one after the other, on zeros, which stay zeros if they are added."""
    if isinstance(run, Fresh):
        return _fresh(run, run.inputs(calls), end)
    _overwrite(x, 0)
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    end()
    return (time.perf_counter() - begin) / calls


def _single(run: Run, x: Array | None, end: Callable[[], object]) -> float:
    """Time one call on an input that was just written, as a program would have written it.

    An input that is not written again would still be in the other rank's cache.
    """
    if isinstance(run, Fresh):
        (x,) = inputs = run.inputs(1)
        _overwrite(x, 1)
        return _fresh(run, inputs, end)
    _overwrite(x, 1)
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    run()
    end()
    return time.perf_counter() - begin


def _fresh(run: Fresh, inputs: Sequence[Array], end: Callable[[], object]) -> float:
    """Time one call on each of the inputs; all results are kept."""
    call, results = run.call, list[Array]()
    keep = results.append
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    for x in inputs:
        keep(call(x))
    end()
    taken = time.perf_counter() - begin
    run.results = results
    return taken / len(inputs)


def _overwrite(x: Array | None, value: int) -> None:
    if x is not None:
        x.fill(value)
        backend_of(x).synchronize()
