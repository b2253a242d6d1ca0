"""Schedules in which rank r has the stages r and 2 P - 1 - r: a V, whose tip is the last rank.

Qi et al. 2024 (Pipeline Parallelism with Controllable Memory).  The first and the last stage are on
the same rank, so that what one rank keeps for longest, another frees first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from parallel.pipeline.actions import Action, BackwardInput, BackwardWeight, Computation, Forward
from parallel.pipeline.schedules.repeated_block import Slots, reordered

PERIOD = 6  # of a repeated block: F, I and W of two stages, one unit of time each
KINDS = Forward, Forward, BackwardInput, BackwardInput  # at the times of a block
CHUNKS = (0, 1, 1, 0)  # which of a rank's stages


def v_stages(rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the stages of a rank."""
    return rank, 2 * num_ranks - 1 - rank


def zb_v(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the lists of ZB-V: nothing waits if F, I and W take equally long."""
    # The phases need 2 P - 1 micro-batches; the ones in excess are left out at the end.
    number = max(num_micro_batches, 2 * num_ranks - 1)
    rows = [_zb_v(rank, num_ranks, number) for rank in range(num_ranks)]
    return [[x for x in row if x.micro_batch < num_micro_batches] for row in rows]


def _zb_v(rank: int, num_ranks: int, number: int) -> Iterator[Action]:
    """Yield what a rank does: fill the pipeline, alternate, and at the end do I before W."""
    stages, left = v_stages(rank, num_ranks), num_ranks - rank
    done: Counter[tuple[type[Computation], int]] = Counter()

    def take(*kinds: type[Computation], chunk: int) -> Iterator[Action]:
        for kind in kinds:
            yield kind(stages[chunk], done[kind, chunk])
            done[kind, chunk] += 1

    for _ in range(2 * left - 1):
        yield from take(Forward, chunk=0)
    for _ in range(rank):
        yield from take(Forward, chunk=1)
        yield from take(Forward, chunk=0)
    for _ in range(left):
        yield from take(Forward, BackwardInput, BackwardWeight, chunk=1)
    while done[Forward, 1] < number:
        if done[Forward, 0] < number:
            yield from take(Forward, chunk=0)
        yield from take(BackwardInput, BackwardWeight, chunk=0)
        yield from take(Forward, BackwardInput, BackwardWeight, chunk=1)
    for _ in range(rank):
        yield from take(BackwardInput, chunk=0)
        yield from take(BackwardInput, chunk=1)
    for _ in range(left):
        yield from take(BackwardInput, BackwardWeight, chunk=0)
    for chunk in (1, 0):
        while done[BackwardWeight, chunk] < done[BackwardInput, chunk]:
            yield from take(BackwardWeight, chunk=chunk)


def v_half(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the lists of V-Half: half the activations of 1F1B."""
    gap = 3 if num_ranks % 2 == 0 else 0  # so that no two times of a rank are equal
    times = [
        (2 * r, 3 * num_ranks - r - 2, 3 * num_ranks + gap + 2 * r - 1, 6 * num_ranks + gap - r - 2)
        for r in range(num_ranks)
    ]
    return reordered(repeated(times, num_micro_batches), most_kept=2 * ((num_ranks + 2) // 2))


def v_min(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the lists of V-Min: the fewest activations, a third as many as 1F1B."""
    gap = 2 if num_ranks % 3 == 0 else 0
    times = [
        (r, 2 * num_ranks - r - 1, 2 * num_ranks + gap + r, 4 * num_ranks + gap - r - 1)
        for r in range(num_ranks)
    ]
    return reordered(repeated(times, num_micro_batches), most_kept=2 * ((num_ranks + 4) // 3))


def repeated(times: Sequence[tuple[int, ...]], num_micro_batches: int) -> list[Slots]:
    """Return the slots of a block that repeats every `PERIOD` units of time.

    `times` are the times of F and I in the two stages of each rank.
    """
    rows: list[Slots] = []
    for rank, block in enumerate(times):
        stages = v_stages(rank, len(times))
        rows.append(
            {
                start + PERIOD * k: kind(stages[chunk], k)
                for k in range(num_micro_batches)
                for start, kind, chunk in zip(block, KINDS, CHUNKS, strict=True)
            }
        )
    return rows
