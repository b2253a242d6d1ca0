"""Reads GOAL back, and runs it: sends and receives in pairs, in the order of `requires`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

OPERATION = re.compile(
    r"l(\d+): (?:(send|recv) (\d+)b (?:to|from) (\d+) tag (\d+) cpu (\d+) nic (\d+)"
    r"|(calc) (\d+) cpu (\d+))"
)
REQUIRES = re.compile(r"l(\d+) requires l(\d+)")
SUMMARY = re.compile(r"// sends (\d+) messages, (\d+) bytes; (\d+) empty ones are written as 1b")


class Operation(NamedTuple):
    """`ends`: source, destination and tag of a message.  `size`: bytes, or nanoseconds."""

    verb: str
    size: int
    ends: tuple[int, int, int] | None = None


class Rank(NamedTuple):
    """The operations of a rank by label, what each requires, and the numbers of its comment."""

    operations: dict[int, Operation]
    requires: dict[int, set[int]]
    summary: tuple[int, int, int]


def read(lines: Iterable[str]) -> list[Rank]:
    """Every rank of a file.  Fails at a line that is not of the form that we write."""
    first, *others = lines
    ranks: list[Rank] = []
    for line in others:
        if line == f"rank {len(ranks)} {{":
            operations: dict[int, Operation] = {}
            requires: dict[int, set[int]] = defaultdict(set)
        elif match := SUMMARY.fullmatch(line):
            summary = int(match[1]), int(match[2]), int(match[3])
        elif match := REQUIRES.fullmatch(line):
            assert {int(match[1]), int(match[2])} <= operations.keys(), line
            requires[int(match[1])].add(int(match[2]))
        elif line == "}":
            ranks.append(Rank(operations, requires, summary))
        elif line:
            label, operation = operation_of(line, len(ranks))
            operations[label] = operation
    assert first == f"num_ranks {len(ranks)}"
    return ranks


def operation_of(line: str, rank: int) -> tuple[int, Operation]:
    match = OPERATION.fullmatch(line)
    assert match is not None, line
    if match[8]:
        return int(match[1]), Operation("calc", int(match[9]))
    assert int(match[3]) > 0, f"{line}: LogGOPSim computes size - 1 without sign"
    peer = int(match[4])
    pair = (rank, peer) if match[2] == "send" else (peer, rank)
    return int(match[1]), Operation(match[2], int(match[3]), (*pair, int(match[5])))


def run(ranks: list[Rank]) -> dict[tuple[int, int], list[int]]:
    """The sizes of the messages from rank to rank, after running all; fails if they wait forever.

    A send and its receive end together, when both have begun, as for the largest messages.
    """
    left = [{n: set(rank.requires[n]) for n in rank.operations} for rank in ranks]
    begun: dict[tuple[int, int, int], tuple[int, int]] = {}
    sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            for label in [n for n, needs in left[number].items() if not needs]:
                del left[number][label]
                moved = True
                operation = rank.operations[label]
                if operation.ends is None:
                    end(left[number], label)
                elif operation.ends not in begun:
                    begun[operation.ends] = number, label
                else:
                    other, its_label = begun.pop(operation.ends)
                    first = ranks[other].operations[its_label]
                    assert first.size == operation.size, (first, operation)
                    assert {first.verb, operation.verb} == {"send", "recv"}, (first, operation)
                    sizes[operation.ends[:2]].append(operation.size)
                    end(left[number], label)
                    end(left[other], its_label)
    assert not begun and not any(left), f"never completed: {begun}"
    return sizes


def end(waiting: dict[int, set[int]], label: int) -> None:
    for needs in waiting.values():
        needs.discard(label)
