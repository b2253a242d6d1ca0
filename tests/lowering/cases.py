"""Collective calls to lower and to prove: all algorithms, kinds of counts, places of the output."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple
from zlib import crc32

from collectives import algorithms
from collectives.arrays import operator
from collectives.lowering import DeviceProgram, LoweredCall, lower
from collectives.lowering.verify import Sizes
from collectives.programs import Aliasing, CallSpec, Counts, Program, compile_call
from collectives.schedule import SPECS, even_counts
from tests.scenarios.jobs import dtype

KINDS = "even", "uneven", "sparse", "empty"  # of counts
# The ranks whose output is a part of their input or contains it; or it overlaps somewhere.
IN_PLACE = "none", "all", "odd", "anywhere"


class Case(NamedTuple):
    """One call on all ranks."""

    collective: str
    name: str
    size: int
    counts: Counts
    options: tuple[tuple[str, int], ...] = ()
    root: int = 0
    segments: int = 1
    op: str = "sum"
    in_place: str = "none"
    staged: Collection[tuple[int, int]] = frozenset()
    dtype: str = "float32"

    def lengths(self, rank: int) -> tuple[int, int]:
        """The elements of a rank's input and output."""
        counts: Any = self.counts
        is_root = rank == self.root
        if num_shards := self.shards():
            inputs = counts if isinstance(counts, int) else sum(counts)
            output = counts if isinstance(counts, int) else counts[rank]
            return inputs * even_counts(num_shards, self.size)[rank], output
        if SPECS[self.collective].has_pieces:
            has_input = self.collective != "broadcast" or is_root
            has_output = {"reduce": is_root, "exscan": rank > 0}.get(self.collective, True)
            return counts * has_input, counts * has_output
        if self.collective == "all_to_all":
            return sum(counts[rank]), sum(row[rank] for row in counts)
        return {
            "scatter": (sum(counts) * is_root, counts[rank]),
            "gather": (counts[rank], sum(counts) * is_root),
            "all_gather": (counts[rank], sum(counts)),
            "reduce_scatter": (sum(counts), counts[rank]),
            "barrier": (0, 0),
        }[self.collective]

    def shards(self) -> int:
        """The number of shards that all ranks have together; 0: each rank has its input."""
        return dict(self.options).get("shards", 0)

    def aliasing(self, rank: int) -> Aliasing:
        """Where the rank's output lies beside its input, where both exist."""
        is_apart = self.in_place == "none" or (self.in_place == "odd" and rank % 2 == 0)
        if is_apart or not all(self.lengths(rank)) or self.shards():
            return "none"
        if self.in_place == "anywhere":
            return _anywhere(*self.lengths(rank), rank)
        if SPECS[self.collective].has_pieces or self.collective == "all_to_all":
            return 0
        start = sum(self.counts[:rank])  # type: ignore[index, arg-type]
        return -start if self.collective in ("gather", "all_gather") else start

    def programs(self) -> list[Program]:
        entry = algorithms.info(self.collective, self.name)
        options = entry.options | dict(self.options)
        is_reduction = SPECS[self.collective].is_reduction
        spec = CallSpec(
            self.collective,
            entry,
            tuple(options.items()),
            self.segments,
            self.name,
            dtype(self.dtype),
            self.counts,
            self.root,
            operator(self.op, self.collective) if is_reduction else None,
        )
        return [
            compile_call(spec._replace(aliasing=self.aliasing(rank)), rank, self.size)
            for rank in range(self.size)
        ]

    def lowered(self) -> list[DeviceProgram]:
        return [*self.call().lowered]

    def call(self, lowered: Sequence[DeviceProgram] | None = None) -> LoweredCall:
        """The call for the proof, with its own device programs or with others."""
        programs, is_barrier = self.programs(), self.collective == "barrier"
        sizes = [Sizes(*self.lengths(rank), self.aliasing(rank)) for rank in range(self.size)]
        if lowered is None:
            aliasings = [each.aliasing for each in sizes]
            lowered = lower(programs, aliasings, staged=self.staged, is_barrier=is_barrier)
        return LoweredCall(programs, lowered, sizes, is_barrier)


def _anywhere(num_input: int, num_output: int, rank: int) -> Aliasing:
    """An offset at which the two overlap, also one that is no whole number of elements."""
    rng = random.Random(f"{num_input} {num_output} {rank}")
    return rng.choice(("odd", *[rng.randrange(1 - num_output, num_input) for _ in range(3)]))


def counts_of(collective: str, size: int, kind: str) -> Counts:
    """The elements of a call: the same for all ranks, others for each, for one rank only, or 0."""
    if collective == "barrier":
        return (0,) * size
    if SPECS[collective].has_pieces:
        return {"even": 2 * size, "uneven": 2 * size + 3, "sparse": 1, "empty": 0}[kind]
    number = {
        "even": lambda i: 2,
        "uneven": lambda i: (3 * i + 1) % 5,
        "sparse": lambda i: 3 * (i == 0),
        "empty": lambda i: 0,
    }[kind]
    if collective != "all_to_all":
        return tuple(map(number, range(size)))
    return tuple(tuple(number(i + 2 * j) for j in range(size)) for i in range(size))


def draw(
    rng: random.Random, collective: str, name: str, size: int, kind: str, in_place: str
) -> Case:
    """A case, of which all the rest is drawn."""
    spec = SPECS[collective]
    averages = ("all_reduce", "reduce", "reduce_scatter")
    pairs = [*combinations(range(size), 2)]
    share = rng.choice((0.0, 0.0, 0.3, 1.0))
    return Case(
        *(collective, name, size, counts_of(collective, size, kind)),
        root=rng.randrange(size) if spec.is_rooted else 0,
        segments=rng.choice((1, 3, 5)) if spec.is_reduction else 1,
        op=rng.choice(("sum", "avg")) if collective in averages else "sum",
        in_place=in_place,
        staged=frozenset(pair for pair in pairs if rng.random() < share),
    )


def cases(collective: str, name: str, sizes: Sequence[int], num_each: int) -> Iterator[Case]:
    """So many cases for each size, of different kinds of counts and places of the output.

    Of four, each is of another kind and has another place.  Four sizes that the algorithm serves,
    one after another, have all 16.
    """
    rng, serves = random.Random(f"{collective} {name}"), algorithms.info(collective, name).serves
    for size in filter(serves, sizes):
        turn = crc32(name.encode()) + sum(map(serves, range(1, size)))
        for number in range(num_each * turn, num_each * (turn + 1)):
            kind, in_place = KINDS[number % 4], IN_PLACE[(number + number // 4) % 4]
            yield draw(rng, collective, name, size, kind, in_place)
