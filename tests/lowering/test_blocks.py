"""Every algorithm as one kernel of several blocks, proved without a device.

`verify_lowered` runs the blocks of all ranks with vector clocks.  Each operation is shared by the
blocks in another way, as if it had other vectors: which block has a byte is not known before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from collectives import ScheduleError, algorithms
from collectives.lowering import DeviceKind, DeviceProgram, LoweredCall, blocks, verify_lowered
from collectives.lowering.blocks import Shares, Step, in_blocks, in_steps
from collectives.lowering.spans import Spans
from tests.algorithms.catalogue import EVERY, each_algorithm
from tests.lowering.cases import IN_PLACE, KINDS, Case, cases, draw

ITEMSIZE = 4
SHARES = Shares(3, (1, 2, 4, 1, 4, 2, 2))
Steps = Iterator[Step]


def steps_of(
    case: Case, lowered: Sequence[DeviceProgram], change: Callable[[Steps], Steps] = iter
) -> list[list[Step]]:
    """The steps of each rank, which `change` may spoil."""
    memories = [Spans(case.aliasing(rank), ITEMSIZE) for rank in range(case.size)]
    return [[*change(in_steps(*each))] for each in zip(lowered, memories, strict=True)]


def call_in_blocks(
    case: Case, shares: Shares = SHARES, change: Callable[[Steps], Steps] = iter
) -> LoweredCall:
    """The call with a device program for each block."""
    call = case._replace(staged=frozenset()).call()
    lowered = in_blocks(steps_of(case, call.lowered, change), shares, ITEMSIZE)
    return call._replace(lowered=lowered, num_blocks=shares.num_blocks)


def prove(calls: Sequence[Case], record: Callable[[str, object], None]) -> None:
    """Prove calls one after the other."""
    try:
        verify_lowered(*map(call_in_blocks, calls))
    except ScheduleError as error:
        raise AssertionError(f"{calls}: {error}") from error
    record("device_programs_proved", sum(case.size for case in calls))


@each_algorithm
@pytest.mark.slow
def test_every_algorithm_in_blocks_is_proved(
    collective: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    for size in filter(algorithms.info(collective, name).serves, (1, 2, 3, 4, 5, 8)):
        prove([*cases(collective, name, [size], 4)], record_property)


@pytest.mark.parametrize("seed", range(10))
def test_different_collectives_in_a_row_are_proved_in_blocks(
    seed: int, record_property: Callable[[str, object], None]
) -> None:
    rng = random.Random(seed)
    size = rng.randrange(2, 6)
    entries = [entry for entry in EVERY if algorithms.info(*entry).serves(size)]
    calls = [
        draw(rng, *rng.choice(entries), size, rng.choice(KINDS), rng.choice(IN_PLACE))
        for _ in range(6)
    ]
    prove(calls, record_property)


# What is made


def barriers(case: Case) -> list[list[str]]:
    """The kinds of the operations before which the blocks of each rank wait for each other."""
    return [
        [step.operation.kind.name for step in steps if step.is_after_barrier]
        for steps in steps_of(case, case.lowered())
    ]


def test_only_signals_and_bytes_that_were_used_before_need_barriers() -> None:
    assert barriers(Case("all_reduce", "one_shot", 2, 8)) == [["SIGNAL"]] * 2
    assert barriers(LANES)[1] == ["COMBINE", "DIVIDE", "DIVIDE", "DIVIDE", "SIGNAL"]


def test_messages_through_the_host_are_not_for_kernels() -> None:
    case = Case("all_gather", "ring", 3, (2, 2, 2))
    assert all(map(blocks.can_be_kernel, case.lowered()))
    staged = case._replace(staged=frozenset({(0, 1)})).lowered()
    assert [blocks.can_be_kernel(program) for program in staged] == [False, False, True]


# What the proof notices


def without_barriers(kind: DeviceKind) -> Callable[[Steps], Steps]:
    """Leave out all barriers before operations of a kind."""

    def changed(steps: Steps) -> Steps:
        for step in steps:
            is_left_out = step.operation.kind == kind
            yield step._replace(is_after_barrier=step.is_after_barrier and not is_left_out)

    return changed


def only_between_neighbours(steps: Steps) -> Steps:
    """Look for bytes in common in operations that follow each other directly, and no others."""
    before = DeviceKind.AWAIT
    for step in steps:
        is_work = before not in (DeviceKind.AWAIT, DeviceKind.SIGNAL)
        is_signal = step.operation.kind == DeviceKind.SIGNAL
        yield step._replace(is_after_barrier=step.is_after_barrier and (is_signal or is_work))
        before = step.operation.kind


LANES = Case("reduce", "linear", 2, 7, root=1, segments=5, op="avg", in_place="all")
FAULTS = {
    "no barrier before a signal": (
        without_barriers(DeviceKind.SIGNAL),
        Case("all_reduce", "one_shot", 2, 8),
    ),
    "no barrier before a copy": (
        without_barriers(DeviceKind.COPY),
        Case("all_reduce", "swing", 4, 8, in_place="anywhere"),
    ),
    "no barrier before a combination": (without_barriers(DeviceKind.COMBINE), LANES),
    "no barrier before a division": (without_barriers(DeviceKind.DIVIDE), LANES),
    "no barrier across an await": (
        only_between_neighbours,
        Case("reduce", "linear", 4, 11, segments=5, in_place="anywhere"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_barrier_that_is_missing_is_noticed(fault: str) -> None:
    change, case = FAULTS[fault]
    verify_lowered(call_in_blocks(case))
    with pytest.raises(ScheduleError, match=r"block . of rank . (reads|writes) what block"):
        verify_lowered(call_in_blocks(case, change=change))
