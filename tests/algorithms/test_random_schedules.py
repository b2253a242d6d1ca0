"""Random schedules, which no algorithm ever was: plans compute what the verifier says they do.

Every round is drawn at random and kept if the verifier takes it.  So programs meet combinations of
operations, names, sizes and memory that no collective has yet asked for.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from collectives import ScheduleError
from collectives.arrays.backends import HOST
from collectives.engines.threads import ThreadTransport, World
from collectives.engines.transport import Execution, Operands
from collectives.programs.lanes import Lanes
from collectives.programs.lifetimes import outline
from collectives.programs.placement import _Compiler
from collectives.programs.program import assembled
from collectives.schedule import Block, Copy, CopyReduce, Recv, RecvReduce, Round, Send
from collectives.schedule.contracts import Case, after, before
from collectives.schedule.layout import by_rank, consecutive
from collectives.schedule.verify import SymbolicRun
from tests.programs.test_plan_proof import Words, run_together

NUM_ROUNDS, LONGEST = 5, 30


def random_round(draw: random.Random, run: SymbolicRun) -> list[Round]:
    """Messages along a random permutation of the ranks, then what each rank does for itself."""
    size = run.case.size
    to = draw.sample(range(size), size)
    rounds: list[list[Any]] = [[] for _ in range(size)]
    for source, destination in enumerate(to):
        if source != destination and draw.random() < 0.8:
            blocks = draw.sample(sorted(run.state[source], key=repr), draw.randint(1, 2))
            into = [renamed(draw, block) for block in blocks] if draw.random() < 0.5 else []
            rounds[source].append(Send(destination, blocks))
            reduces = draw.random() < 0.5
            side = draw.choice(["left", "right"])
            receive = (
                RecvReduce(source, blocks, side, into) if reduces else Recv(source, blocks, into)
            )
            rounds[destination].append(receive)
    for rank, operations in enumerate(rounds):
        if draw.random() < 0.6:
            blocks = draw.sample(sorted(run.state[rank], key=repr), draw.randint(1, 2))
            into = [renamed(draw, block) for block in blocks]
            operations.append(draw.choice([Copy(blocks, into), CopyReduce(blocks, into)]))
    return [tuple(draw.sample(operations, len(operations))) for operations in rounds]


def renamed(draw: random.Random, block: Block) -> Block:
    """Another name for a value of the same size."""
    number = block[1] if isinstance(block, tuple) else block
    return draw.choice([number, ("x", number), ("y", number)])


def random_run(draw: random.Random, collective: str, case: Case) -> SymbolicRun:
    """A valid schedule, carried out by the verifier."""
    run = SymbolicRun(collective, case, [[] for _ in range(case.size)])
    while len(run.schedules[0]) < NUM_ROUNDS:
        kept = [dict(state) for state in run.state]
        for schedule, operations in zip(run.schedules, random_round(draw, run), strict=True):
            schedule.append(operations)
        try:
            run.check_operations()
            run.round(len(run.schedules[0]) - 1)
            is_short = all(len(v.parts) <= LONGEST for state in run.state for v in state.values())
        except (ScheduleError, ValueError):
            is_short = False
        if not is_short:
            run.state = kept
            for schedule in run.schedules:
                schedule.pop()
    return run


def word(parts: Any, index: int) -> str:
    return "".join(f"{rank}:{block}:{index};" for rank, block in parts)


class Driven:
    """An execution, driven as plans are."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    def start(self) -> None:
        """Nothing needs to be done to begin."""

    def test(self) -> bool:
        return self._execution.advance(0.0)


def mismatches(run: SymbolicRun, sizes: list[int], in_place: bool) -> list[str]:
    """Where the plans of all ranks end with other words than the verifier."""
    words, world, named = Words(), World(run.case.size), by_rank(sizes)
    plans, ends = [], []
    for rank, schedule in enumerate(run.schedules):
        places = [
            consecutive(buffer, blocks(run.collective, rank, run.case), named)
            for buffer, blocks in (("input", before), ("output", after))
        ]
        lengths = [sum(region.num_elements for region in place.values()) for place in places]
        x, out = (np.full(length, -1, np.int64) for length in lengths)
        offset = "none"
        if in_place and run.collective == "reduce_scatter":
            offset = sum(sizes[:rank])
            out = x[offset : offset + sizes[rank]]
        elif in_place:
            offset, out = 0, x
        for block, (_, start, stop) in places[0].items():
            x[start:stop] = [words.number(word([(rank, block)], i)) for i in range(stop - start)]
        lanes = Lanes((_Compiler(named, *places, offset).lane(outline(schedule)),))
        program = assembled(lanes, x.itemsize)
        scratch = np.full(program.num_scratch // x.itemsize, -1, np.int64)
        transport = ThreadTransport(world, range(run.case.size), rank)
        operands = Operands(HOST, x, out, scratch, words.join.function)
        plans.append(Driven(transport.execution(program, operands, 1)))
        ends.append((rank, places[1], out))
    run_together(plans)
    return [
        f"rank {rank}, block {block}"
        for rank, places, out in ends
        for block, (_, start, stop) in places.items()
        if words.decoded(out[start:stop])
        != [word(run.state[rank][block].parts, i) for i in range(stop - start)]
    ]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
@pytest.mark.slow
def test_plans_do_what_the_verifier_says(collective: str, in_place: bool) -> None:
    for seed in range(150):
        draw = random.Random(seed)
        size = draw.randint(2, 4)
        case = Case(size, 0, 3 if collective == "all_reduce" else 1)
        run = random_run(draw, collective, case)
        sizes = [draw.choice([0, 1, 2, 5]) for _ in range(max(size, case.num_pieces))]
        named = sizes[: case.num_pieces if collective == "all_reduce" else size]
        assert mismatches(run, named, in_place) == [], f"seed {seed}"


def test_a_block_that_ends_elsewhere_would_be_noticed() -> None:
    run = random_run(random.Random(1), "all_reduce", Case(3, 0, 3))
    run.state[1][0], run.state[1][1] = run.state[1][1], run.state[1][0]
    assert mismatches(run, [2, 2, 2], in_place=False) != []
