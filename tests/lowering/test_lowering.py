"""Every algorithm as device programs that read each other's memory, proved without a device.

`verify_lowered` runs the device programs of all ranks on random words with vector clocks: every
read is in order with every write, no ranks wait in a circle, and every word of every result is what
the program makes of the inputs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from collectives import ScheduleError, algorithms
from collectives.lowering import (
    MOST_OPERANDS,
    Counter,
    DeviceKind,
    DeviceOperation,
    DeviceProgram,
    LoweredCall,
    Place,
    in_order,
    lower,
    verify_lowered,
)
from collectives.lowering.spans import Span
from collectives.programs import INPUT, OUTPUT
from tests.algorithms.catalogue import EVERY, each_algorithm, settings
from tests.lowering.cases import IN_PLACE, KINDS, Case, cases, counts_of, draw

Record = Callable[[str, object], None]


def prove(calls: Sequence[Case], record: Record) -> None:
    """Prove calls, each also as the one after another call; count the programs."""
    lowered = [case.call() for case in calls]
    for start in range(0, len(calls), 2):
        group = slice(start, start + 3)  # the last of these begins the next group
        try:
            verify_lowered(*lowered[group])
        except ScheduleError as error:
            raise AssertionError(f"{calls[group]}: {error}") from error
    record("device_programs_proved", sum(case.size for case in calls))


@each_algorithm
@pytest.mark.slow
def test_every_algorithm_is_proved_on_few_ranks(
    collective: str, name: str, record_property: Record
) -> None:
    for size in (1, 2, 3, 4):
        prove([*cases(collective, name, [size], 16)], record_property)


@each_algorithm
@pytest.mark.slow
def test_every_algorithm_is_proved_on_more_ranks(
    collective: str, name: str, record_property: Record
) -> None:
    """Of each size half of the kinds of counts, of two sizes all of them."""
    for size in (5, 6, 7, 8, 9):
        prove([*cases(collective, name, [size], 2)], record_property)


@each_algorithm
@pytest.mark.slow
def test_every_algorithm_is_proved_on_many_ranks(
    collective: str, name: str, record_property: Record
) -> None:
    size = random.Random(name).choice((12, 13, 16, 18))
    prove([*cases(collective, name, [size], 2)], record_property)


@each_algorithm
def test_every_algorithm_is_proved_with_other_options(
    collective: str, name: str, record_property: Record
) -> None:
    rng = random.Random(name)
    for options in settings(collective, name):
        sizes = [p for p in range(2, 10) if algorithms.info(collective, name).serves(p, **options)]
        if sizes:
            kind, in_place = rng.choice(KINDS[:3]), rng.choice(IN_PLACE)
            case = draw(rng, collective, name, rng.choice(sizes), kind, in_place)
            prove([case._replace(options=tuple(options.items()))], record_property)


@pytest.mark.parametrize("seed", range(20))
def test_different_collectives_in_a_row_are_proved(seed: int, record_property: Record) -> None:
    rng = random.Random(seed)
    size = rng.randrange(2, 7)
    entries = [entry for entry in EVERY if algorithms.info(*entry).serves(size)]
    calls = [
        draw(rng, *rng.choice(entries), size, rng.choice(KINDS), rng.choice(IN_PLACE))
        for _ in range(8)
    ]
    prove(calls, record_property)


# What is made


def lowered(name: str, size: int, collective: str = "all_reduce") -> list[DeviceProgram]:
    return Case(collective, name, size, counts_of(collective, size, "even")).lowered()


def test_a_device_program_is_printed() -> None:
    program = lowered("one_shot", 2)[1]
    assert str(program).splitlines() == [
        "  0 signal  ready 1->0 1",
        "  0 await   ready 0->1 1",
        "  0 combine 16 bytes to output of 1 at 0 from input of 0 at 0, input of 1 at 0",
        "  0 signal  read 1->0 1",
        "  0 await   read 0->1 1",
    ]
    assert {kind: number for kind, number in program.counts.items() if number} == {
        "signal": 2,
        "await": 2,
        "combine": 1,
    }
    assert program.num_driver_calls == 3
    assert program.remote_bytes == 16


def test_the_contributions_of_all_ranks_are_combined_at_once() -> None:
    for program in lowered("one_shot", MOST_OPERANDS):
        (combination,) = [x for x in program.operations if x.kind == DeviceKind.COMBINE]
        assert len(combination.operands) == MOST_OPERANDS
    assert lowered("one_shot", MOST_OPERANDS + 1)[0].counts["combine"] == 2


def test_what_peers_have_read_is_awaited_only_where_it_is_overwritten() -> None:
    # Of 14 messages to a neighbour, all but the last are known to be read by what arrives later.
    assert lowered("ring", 8)[0].counts["signal"] == 15
    assert lowered("ring", 8)[0].counts["await"] == 15


@pytest.mark.slow
def test_a_copy_of_no_bytes_is_left_out() -> None:
    for collective, name in EVERY:
        for case in cases(collective, name, [4], 12):
            for operation in (x for program in case.lowered() for x in program.operations):
                is_copy = operation.kind in (DeviceKind.COPY, DeviceKind.COMBINE)
                assert operation.size or not is_copy


def test_ranks_that_share_no_memory_are_staged() -> None:
    pairs = frozenset({(0, 2), (1, 2)})
    programs = Case("all_gather", "ring", 3, (2, 2, 2), staged=pairs).lowered()
    messages = {
        (operation.counter.writer, operation.counter.reader)
        for program in programs
        for operation in program.operations
        if operation.counter is not None and operation.kind == DeviceKind.SEND
    }
    assert messages == {(0, 2), (2, 1)}
    assert [program.counts["receive"] for program in programs] == [0, 2, 2]


@pytest.mark.parametrize("name", ["ring", "two_shot", "hierarchical", "recursive_doubling"])
def test_the_ranks_of_a_host_need_the_programs_of_their_own_host_only(name: str) -> None:
    pairs = frozenset({(0, 2), (0, 3), (1, 2), (1, 3)})
    case = Case("all_reduce", name, 4, 12, staged=pairs)
    programs: list[Any] = case.programs()
    aliasings = [*map(case.aliasing, range(4))]
    whole = lower(programs, aliasings, staged=pairs)
    assert lower([*programs[:2], None, None], aliasings) == [*whole[:2], *[DeviceProgram(())] * 2]
    assert lower([None, None, *programs[2:]], aliasings) == [*[DeviceProgram(())] * 2, *whole[2:]]


# What the proof notices


def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower as if every message could be read where it lies."""
    lowering = sys.modules["collectives.lowering.lower"].Lowering

    def before_writing(self: Any, span: Span) -> None:
        self._await_reads([(message, sent) for message, sent in self.unread if sent.overlaps(span)])

    def acknowledge(self: Any, message: Any) -> None:
        counter = Counter(self.rank, message.peer, is_read=True)
        self._add(DeviceKind.SIGNAL, counter, message.number)

    monkeypatch.setattr(lowering, "before_writing", before_writing)
    monkeypatch.setattr(lowering, "acknowledge", acknowledge)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case("all_reduce", "recursive_doubling", 4, 8), "wait for each other"),
        (Case("all_reduce", "one_shot", 3, 8, in_place="all"), "wait for each other"),
        (
            Case("all_reduce", "all_gather_reduce", 3, 9, segments=3, in_place="all"),
            "wait for each other",
        ),
        (Case("all_reduce", "all_gather_reduce", 3, 9, segments=5), "goes back"),
    ],
)
def test_reading_everything_where_it_lies_is_noticed(
    case: Case, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify_lowered(case.call())
    greedy(monkeypatch)
    with pytest.raises(ScheduleError, match=why):
        verify_lowered(case.call())


Change = Callable[[DeviceOperation], DeviceOperation | None]


def changed(
    programs: Sequence[DeviceProgram], rank: int, at: int, change: Change
) -> list[DeviceProgram]:
    """The device programs with one operation changed, or taken out."""
    operations = list(programs[rank].operations)
    operations[at : at + 1] = [x for x in [change(operations[at])] if x is not None]
    return [*programs[:rank], DeviceProgram(tuple(operations)), *programs[rank + 1 :]]


def positions(
    programs: Sequence[DeviceProgram], *kinds: DeviceKind
) -> list[tuple[int, int, DeviceOperation]]:
    return [
        (rank, at, operation)
        for rank, program in enumerate(programs)
        for at, operation in enumerate(program.operations)
        if operation.kind in kinds
    ]


def small_cases(collective: str, name: str) -> Iterator[Case]:
    """A case of 3 ranks, or of 4; one in place, and one where each second rank is."""
    entry = algorithms.info(collective, name)
    size = next(filter(entry.serves, (3, 4, 5)))
    counts = counts_of(collective, size, "uneven")
    yield Case(collective, name, size, counts, segments=2 if entry.collective == "reduce" else 1)
    yield Case(collective, name, size, counts, in_place="all")
    yield Case(collective, name, size, counts, in_place="odd")


def is_noticed(right: LoweredCall, programs: Sequence[DeviceProgram]) -> bool:
    """Whether it is, if a call with these device programs comes before the right one."""
    try:
        verify_lowered(right._replace(lowered=programs), right)
    except ScheduleError:
        return True
    return False


@each_algorithm
@pytest.mark.slow
def test_every_await_taken_out_is_noticed(collective: str, name: str) -> None:
    rng = random.Random(name)
    for case in small_cases(collective, name):
        right = case.call()
        programs = right.lowered
        awaits = positions(programs, DeviceKind.AWAIT)
        for rank, at, operation in rng.sample(awaits, min(len(awaits), 10)):
            without = changed(programs, rank, at, lambda _: None)
            assert is_noticed(right, without), f"{case}: {operation} of rank {rank}"


@each_algorithm
@pytest.mark.slow
def test_every_signal_taken_out_is_noticed(collective: str, name: str) -> None:
    """But for those after which a later signal lets the same awaits pass, only later."""
    rng = random.Random(name)
    for case in small_cases(collective, name):
        right = case.call()
        programs = right.lowered
        signals = positions(programs, DeviceKind.SIGNAL)
        last = {operation.counter: operation.value for _, _, operation in signals}
        for rank, at, operation in rng.sample(signals, min(len(signals), 10)):
            without = changed(programs, rank, at, lambda _: None)
            is_last = last[operation.counter] == operation.value
            what = f"{case}: {operation} of rank {rank}"
            assert is_noticed(right, without) or not is_last, what


def test_a_wrong_operand_is_noticed() -> None:
    case = Case("all_reduce", "one_shot", 3, 8)
    programs = case.lowered()

    def moved(operation: DeviceOperation) -> DeviceOperation:
        place = operation.operands[1]
        other = Place(place.rank, place.buffer, place.offset + 4)
        return operation._replace(operands=(operation.operands[0], other), size=28)

    def swapped(operation: DeviceOperation) -> DeviceOperation:
        return operation._replace(lefts=operation.lefts ^ 2)

    def doubled(operation: DeviceOperation) -> DeviceOperation:
        return operation._replace(operands=operation.operands[:1] * len(operation.operands))

    for rank, at, _ in positions(programs, DeviceKind.COMBINE):
        for change in (moved, swapped, doubled):
            with pytest.raises(ScheduleError, match="another result"):
                verify_lowered(case.call(changed(programs, rank, at, change)))


def test_writing_into_the_memory_of_a_peer_is_noticed() -> None:
    case = Case("broadcast", "binomial", 2, 4)
    programs = case.lowered()
    _, (rank, at, operation) = positions(programs, DeviceKind.COPY)
    assert operation.target == Place(1, OUTPUT, 0)
    wrong = operation._replace(target=Place(0, OUTPUT, 0))
    with pytest.raises(ScheduleError, match="cannot run"):
        verify_lowered(case.call(changed(programs, rank, at, lambda _: wrong)))


def test_a_copy_onto_a_part_of_itself_is_noticed() -> None:
    case = Case("all_reduce", "one_shot", 2, 4)
    programs = case.lowered()
    wrong = DeviceOperation(
        DeviceKind.COPY, 0, target=Place(0, OUTPUT, 0), size=8, operands=(Place(0, OUTPUT, 4),)
    )
    first = DeviceProgram((wrong, *programs[0].operations))
    with pytest.raises(ScheduleError, match="still reads"):
        verify_lowered(case.call([first, programs[1]]))


def test_a_read_before_the_callers_write_is_noticed() -> None:
    case = Case("broadcast", "binomial", 2, 4)
    early = DeviceOperation(
        DeviceKind.COPY, 0, target=Place(1, OUTPUT, 0), size=16, operands=(Place(0, INPUT, 0),)
    )
    with pytest.raises(ScheduleError, match=r"at the same time|may still read"):
        verify_lowered(case.call([DeviceProgram(()), DeviceProgram((early,))]))


def test_a_barrier_that_a_rank_leaves_early_is_noticed() -> None:
    case = Case("barrier", "dissemination", 2, (0, 0))
    verify_lowered(case.call(), case.call())
    with pytest.raises(ScheduleError, match="leave the barrier"):
        verify_lowered(case.call([DeviceProgram(()), DeviceProgram(())]))


@pytest.mark.parametrize("name", ["ring", "one_shot", "recursive_doubling"])
def test_calls_of_two_communicators_in_different_orders_are_noticed(name: str) -> None:
    """On one stream of each rank.  Each communicator has counters of its own."""

    def of_another_communicator(operation: DeviceOperation) -> DeviceOperation:
        counter = operation.counter
        other = counter and counter._replace(reader=counter.reader + 10)
        return operation._replace(counter=other)

    first = [program.operations for program in lowered(name, 3)]
    second = [[*map(of_another_communicator, operations)] for operations in first]
    [*in_order([[*a, *b] for a, b in zip(first, second, strict=True)])]
    orders = [[*second[0], *first[0]], *([*first[rank], *second[rank]] for rank in (1, 2))]
    with pytest.raises(ScheduleError, match="wait for each other forever"):
        [*in_order(orders)]


def test_a_counter_that_goes_back_is_noticed() -> None:
    case = Case("all_reduce", "ring", 2, 4)
    programs = case.lowered()
    rank, at, operation = positions(programs, DeviceKind.SIGNAL)[-1]
    wrong = operation._replace(value=operation.value - 1)
    with pytest.raises(ScheduleError, match=r"goes back|wait for each other"):
        verify_lowered(case.call(changed(programs, rank, at, lambda _: wrong)))
