"""What the rules for devices are made for: hops, bytes and scratch, counted in device programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import pytest

from collectives import algorithms
from collectives.lowering import DeviceKind, DeviceProgram, lower
from collectives.schedule import SPECS
from collectives.selection import select
from collectives.selection.labels import parse_label
from tests.lowering.cases import Case, counts_of
from tests.scenarios.jobs import COLLECTIVES


class Counted(NamedTuple):
    """The hops of a device program, and the bytes on the link of the busiest rank, as parts of n.

    A hop: a rank raises a counter, for which the device of another one waits.
    """

    hops: int
    link: float


@cache
def counted(collective: str, label: str, size: int) -> Counted:
    n = 840
    counts: Any = n if SPECS[collective].has_pieces else (n // size,) * size
    counts = (counts,) * size if collective == "all_to_all" else counts
    counts = (0,) * size if collective == "barrier" else counts
    named = parse_label(collective, label)
    options = tuple(named.options.items())
    lowered = Case(collective, named.algorithm.name, size, counts, options).lowered()
    sent = Counter[int]()
    for operation in chain.from_iterable(program.operations for program in lowered):
        for operand in operation.operands:
            if operation.target is not None and operand.rank != operation.target.rank:
                sent[operand.rank] += operation.size
    received = [program.remote_bytes for program in lowered]
    return Counted(hops(lowered), max(*sent.values(), *received, 0, 0) / (4 * n))


def hops(lowered: Sequence[DeviceProgram]) -> int:
    """The longest chain of awaits, each of a counter that was raised after the one before it."""
    raised, depths, places = dict[Any, int](), [0] * len(lowered), [0] * len(lowered)
    ends = [len(program.operations) for program in lowered]
    while places != ends:
        for rank, program in enumerate(lowered):
            for operation in program.operations[places[rank] :]:
                message = operation.counter, operation.value
                if operation.kind == DeviceKind.AWAIT:
                    reached = [
                        depth
                        for (counter, value), depth in raised.items()
                        if counter == operation.counter and value >= operation.value
                    ]
                    if not reached:
                        break
                    depths[rank] = max(depths[rank], min(reached) + 1)
                elif operation.kind == DeviceKind.SIGNAL:
                    raised[message] = depths[rank]
                places[rank] += 1
    return max(depths)


def others(collective: str, size: int) -> list[str]:
    """The algorithms that the rules may name: those without options that change what is sent."""
    entries = {name: algorithms.info(collective, name) for name in algorithms.names(collective)}
    is_plain = lambda entry: not {"segments", "shards", "per_host"} & set(entry.options)  # noqa: E731
    return [name for name, entry in entries.items() if entry.serves(size) and is_plain(entry)]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("collective", algorithms.collectives())
def test_small_calls_have_the_fewest_hops_and_large_ones_the_least_bytes(
    collective: str, size: int
) -> None:
    small, large = (
        counted(collective, select.choose(collective, None, size, n, on_device=True).label, size)
        for n in (8, 2**40)
    )
    every = [counted(collective, name, size) for name in others(collective, size)]
    assert small.hops == min(costs.hops for costs in every)
    if collective not in ("scan", "exscan"):  # whose chains send the least, and take the longest
        assert large.link == min(costs.link for costs in every)


def test_other_algorithms_have_more_hops_or_bytes() -> None:
    """Or the comparison would say nothing."""
    assert counted("all_reduce", "ring", 8).hops > counted("all_reduce", "one_shot", 8).hops
    assert counted("all_reduce", "one_shot", 8).link > counted("all_reduce", "two_shot", 8).link


# Scratch


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_scratch_of_a_rank_does_not_depend_on_the_arrays_of_others(collective: str) -> None:
    """So each rank can tell how much it needs, before the ranks meet."""
    sizes = set[tuple[int, int]]()
    for number, name in enumerate(algorithms.names(collective)):
        size = 3 + number % 3
        if not algorithms.info(collective, name).serves(size):
            size = 4
        for in_place in ("odd", "anywhere"):
            counts = counts_of(collective, size, "uneven")
            case = Case(collective, name, size, counts, in_place=in_place)
            programs, places = case.programs(), [case.aliasing(rank) for rank in range(size)]
            apart = case._replace(in_place="none").programs()
            whole = lower(programs, places)
            for rank in range(size):
                alone = [programs[k] if k == rank else apart[k] for k in range(size)]
                mine = [places[k] if k == rank else "none" for k in range(size)]
                needed = lower(alone, mine)[rank].num_scratch(rank)
                assert whole[rank].num_scratch(rank) == needed <= programs[rank].num_scratch, case
                sizes.add((needed, programs[rank].num_scratch))
    assert collective in ("all_to_all", "gather", "broadcast") or any(a < b for a, b in sizes)
