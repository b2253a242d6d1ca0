"""Schedules in which stage r is on rank r, or stages r, r + P, ... are; see `SCHEDULES`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from parallel.pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Computation,
    Forward,
    Update,
)


def naive(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the lists of one micro-batch after the other: 0F0 0B0 0F1 0B1 ..."""
    numbers = range(num_micro_batches)
    return [
        [kind(rank, k) for k in numbers for kind in (Forward, Backward)]
        for rank in range(num_ranks)
    ]


def gpipe(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the lists of all forward, then all backward.  Huang et al. 2019."""
    numbers = range(num_micro_batches)
    return [
        [kind(rank, k) for kind in (Forward, Backward) for k in numbers]
        for rank in range(num_ranks)
    ]


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the lists of one forward, one backward, after P - 1 - r forward to fill.

    Narayanan et al. 2021 (PipeDream-flush).
    """
    ranks = range(num_ranks)
    return [list(alternating(r, num_micro_batches, num_ranks - 1 - r)) for r in ranks]


def pipedream(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the lists of `one_f_one_b` with an update after each B.  Narayanan et al. 2019."""
    return [list(_updated(row)) for row in one_f_one_b(num_ranks, num_micro_batches)]


def _updated(row: list[Action]) -> Iterator[Action]:
    """Yield the actions of a rank, and an update after each backward."""
    for action in row:
        yield action
        if isinstance(action, Backward):
            yield Update(action.stage, action.micro_batch)


def zb_h1(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the lists of `one_f_one_b` with W later than I, so that no more is kept.

    Qi et al. 2023.
    """
    return [
        list(alternating(r, num_micro_batches, num_ranks - 1 - r, delay=r))
        for r in range(num_ranks)
    ]


def zb_h2(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the lists of `zb_h1` with twice as much forward to fill.  Qi et al. 2023."""
    return [
        list(alternating(r, num_micro_batches, 2 * (num_ranks - 1 - r), delay=2 * r))
        for r in range(num_ranks)
    ]


def alternating(
    stage: int, num_micro_batches: int, warmup: int, delay: int | None = None
) -> Iterator[Action]:
    """Yield `warmup` F, then F and B by turns, then the rest of B.

    With a `delay`, each B is an I, and its W follows `delay` I later.
    """
    for k in range(min(warmup, num_micro_batches)):
        yield Forward(stage, k)
    for k in range(num_micro_batches):
        if warmup + k < num_micro_batches:
            yield Forward(stage, warmup + k)
        yield Backward(stage, k) if delay is None else BackwardInput(stage, k)
        if delay is not None and k >= delay:
            yield BackwardWeight(stage, k - delay)
    for k in range(max(num_micro_batches - (delay or 0), 0), num_micro_batches):
        if delay is not None:
            yield BackwardWeight(stage, k)


def interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int) -> list[list[Action]]:
    """Return the lists of one forward, one backward, with `num_chunks` stages on each rank.

    Narayanan et al. 2021 (Megatron-LM).  Micro-batches pass a rank in rounds, as many in each as
    there are ranks or more.  Raises ValueError if rounds are not of equal size.
    """
    num_rounds = max(1, num_micro_batches // num_ranks)
    if num_micro_batches % num_rounds:
        raise ValueError(
            f"interleaved needs rounds of equally many micro-batches: {num_micro_batches} on"
            f" {num_ranks} ranks are no multiple of {num_rounds} rounds"
        )
    round_size = num_micro_batches // num_rounds
    total = num_micro_batches * num_chunks
    lists = []
    for rank in range(num_ranks):
        forward = list(_in_rounds(Forward, rank, num_ranks, total, round_size, num_chunks))
        backward = list(_in_rounds(Backward, rank, num_ranks, total, round_size, num_chunks))
        warmup = min(total, (num_chunks - 1) * round_size + 2 * (num_ranks - 1 - rank))
        row = forward[:warmup]
        for i, action in enumerate(backward):
            row += [*forward[warmup + i : warmup + i + 1], action]
        lists.append(row)
    return lists


def _in_rounds(
    kind: type[Computation], rank: int, num_ranks: int, total: int, round_size: int, num_chunks: int
) -> Iterator[Action]:
    """Yield one kind of actions of a rank: a round through one of its stages, then the next."""
    done: Counter[int] = Counter()
    for i in range(total):
        chunk = i // round_size % num_chunks
        stage = rank + num_ranks * (chunk if kind is Forward else num_chunks - 1 - chunk)
        yield kind(stage, done[stage])
        done[stage] += 1
