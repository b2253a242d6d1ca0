"""Within a round no message may lie where another one arrives: an engine moves them all at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from collectives import algorithms
from collectives.programs import placement
from collectives.programs.placement import compile_lane
from collectives.programs.steps import Message, Step
from collectives.schedule.contracts import SPECS
from collectives.schedule.layout import Region
from tests.algorithms.catalogue import each_algorithm, settings

Offset = int | str


def address(region: Region, offset: Offset) -> tuple[str, int, int]:
    """Where a region lies if the output begins `offset` elements behind the input."""
    if region.buffer == "output" and isinstance(offset, int):
        return "input", region.start + offset, region.stop + offset
    return tuple(region)


def races(step: Step, offset: Offset) -> bool:
    """Whether what arrives in a step lies where something else arrives or leaves."""
    comes, goes = (
        [address(message.region, offset) for message in messages]
        for messages in (step.receives, step.sends)
    )
    pairs = [*combinations(comes, 2), *((come, go) for come in comes for go in goes)]
    return any(a[0] == b[0] and max(a[1], b[1]) < min(a[2], b[2]) for a, b in pairs)


def counts(collective: str, size: int) -> Any:
    """Uneven blocks, some of them empty."""
    if SPECS[collective].has_pieces:
        return 3 * size + 1
    if collective == "barrier":
        return (0,) * size
    if collective == "all_to_all":
        return tuple(tuple((s + 3 * d) % 4 for d in range(size)) for s in range(size))
    return tuple((3 * rank + 1) % 4 for rank in range(size))


def offsets(collective: str, rank: int, root: int, parts: Any) -> list[Offset]:
    """Separate memory, and the natural form in place."""
    start = 0 if SPECS[collective].has_pieces or collective == "all_to_all" else sum(parts[:rank])
    is_whole_in_input = collective == "reduce_scatter" or (collective == "scatter" and rank == root)
    return ["none", start if is_whole_in_input else -start]


def steps(collective: str, name: str) -> Iterator[tuple[Step, Offset]]:
    entry = algorithms.info(collective, name)
    for options in [{}, *list(settings(collective, name))[:4]]:
        for size in filter(lambda p: entry.serves(p, **options), (2, 3, 4, 5, 6, 8, 9, 12)):
            for root in {0, size // 2} if SPECS[collective].is_rooted else {0}:
                for rank in range(size):
                    parts = counts(collective, size)
                    for offset in offsets(collective, rank, root, parts):
                        made = compile_lane(
                            entry, rank, size, root, parts, tuple(options.items()), offset
                        )
                        space = "none" if made.copies_input else offset
                        yield from ((step, space) for step in made.steps)


@each_algorithm
@pytest.mark.slow
def test_nothing_arrives_where_something_else_arrives_or_leaves(collective: str, name: str) -> None:
    assert not any(races(step, offset) for step, offset in steps(collective, name))


def test_a_program_that_forgets_what_is_being_sent_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = placement._Compiler.joined_home
    monkeypatch.setattr(
        placement._Compiler, "joined_home", lambda self, blocks, busy: right(self, blocks, ())
    )
    has_races = any(races(*step) for step in steps("all_reduce", "recursive_doubling"))
    assert has_races


def test_a_race_is_noticed() -> None:
    here, there = Region("input", 0, 4), Region("output", 2, 6)
    step = Step(sends=(Message(1, here),), receives=(Message(1, there),))
    assert races(step, 0) and races(step, 1)
    assert not races(step, "none") and not races(step, 2)
