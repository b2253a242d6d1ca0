"""Times calls: contenders side by side in random order, medians of samples, of the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from bench.fresh import Fresh
from bench.oracle import Array
from collectives.arrays.backends import backend_of

SMALL = 64 << 10  # bytes below which the calls are too short to be timed one by one
BLOCK_CALLS = 40  # calls that are timed together then
FEWEST = 3  # samples that are taken however long they take

Run = Callable[[], Any]


class Effort(NamedTuple):
    """Calls before, samples of each contender, and seconds after which fewer samples must do.

    `calls`: those that make one sample where the calls are small.
    """

    warmup: int
    samples: int
    seconds: float
    calls: int = BLOCK_CALLS


def times(runs: Sequence[Run], x: Array | None, *, is_small: bool, effort: Effort) -> list[float]:
    """Seconds per call of each of `runs`, which all read `x`: the same on every rank.

    The contenders take turns, so that whatever else the machine does meets all of them, and in
    another order every time, because each finds the caches as the one before has left them.
    """
    for _ in range(effort.warmup):
        for run in runs:
            _single(run, x)
    calls = effort.calls if is_small else 1
    taken: list[list[float]] = [[] for _ in runs]
    turns, shuffle = list(range(len(runs))), Random(0).shuffle  # the same on every rank
    for _ in _rounds(effort):
        shuffle(turns)
        for turn in turns:
            taken[turn].append(_sample(runs[turn], x, calls))
    mine = np.array([median(each) for each in taken])
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, mine, MPI.MAX)
    return list(mine.tolist())


def _rounds(effort: Effort) -> Iterator[int]:
    """As many rounds as samples are wanted, but no new one when the time is up on rank 0."""
    end = time.perf_counter() + effort.seconds
    for number in range(effort.samples):
        if number >= FEWEST and not MPI.COMM_WORLD.bcast(time.perf_counter() < end):
            return
        yield number


def _sample(run: Run, x: Array | None, calls: int) -> float:
    """Seconds of a call: of a large one alone, of a small one in the mean over many."""
    if calls == 1:
        return _single(run, x)
    return _block(run, x, calls)


def _block(run: Run, x: Array | None, calls: int) -> float:
    """Many calls one after the other, on zeros: those stay zeros, however often they are added."""
    if isinstance(run, Fresh):
        return _fresh(run, run.inputs(calls))
    _overwrite(x, 0)
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) / calls


def _single(run: Run, x: Array | None) -> float:
    """One call on an input that was just written, as a program would have written it.

    An input that is not written again would still be in the other rank's cache.
    """
    if isinstance(run, Fresh):
        (x,) = inputs = run.inputs(1)
        _overwrite(x, 1)
        return _fresh(run, inputs)
    _overwrite(x, 1)
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _fresh(run: Fresh, inputs: Sequence[Array]) -> float:
    """One call on each of the inputs; all results are kept."""
    call, results = run.call, list[Array]()
    keep = results.append
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    for x in inputs:
        keep(call(x))
    taken = time.perf_counter() - begin
    run.results = results
    return taken / len(inputs)


def _overwrite(x: Array | None, value: int) -> None:
    if x is not None:
        x.fill(value)
        backend_of(x).synchronize()
