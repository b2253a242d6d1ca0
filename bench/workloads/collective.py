"""One collective at one size: its buffers, its inputs, and the check of its result.

With equal blocks all collectives have the same form: a buffer is a matrix with one row for each of
its p blocks, or one row, and every column is treated in the same way.  So the right result is made
from a window of columns of all ranks at a time.  With uneven blocks it is made from their whole
buffers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.workloads.expected import Array, expected
from collectives.arrays.backends import HOST, Backend
from collectives.schedule import Topology, contracts
from collectives.schedule.contracts import SPECS

SPLITS = frozenset({"scatter", "reduce_scatter", "all_to_all"})  # p blocks in the input
JOINS = frozenset({"gather", "all_gather", "all_to_all"})  # p blocks in the output
Counts = tuple[int, ...] | tuple[tuple[int, ...], ...]

WINDOW = 1 << 16  # columns made and checked at once
POISON = 99  # no input holds it


class Case(NamedTuple):
    """A case to measure, on one rank."""

    collective: str
    rank: int
    size: int
    num_elements: int  # of the whole vector; for an all-to-all, of the mean input
    dtype: np.dtype[Any]
    op: str = "sum"
    root: int = 0
    backend: Backend = HOST  # where its arrays are
    topology: Topology | None = None  # the hosts of the ranks; None: all are on one host
    # The elements of the block of each rank, or a table from rank (row) to rank (column) for an
    # all-to-all; None: all blocks are equal.
    counts: Counts | None = None

    @property
    def block(self) -> int:
        """Elements of one block, which is the whole vector where nothing is divided."""
        is_divided = self.collective in SPLITS | JOINS
        return self.num_elements // self.size if is_divided else self.num_elements

    @property
    def num_bytes(self) -> int:
        """n: the bytes of the whole vector."""
        return self.num_elements * self.dtype.itemsize

    @property
    def num_in(self) -> int:
        """Blocks of this rank's input, 0 if it has none."""
        if not contracts.before(self.collective, self.rank, self._instance):
            return 0
        return self.size if self.collective in SPLITS else 1

    @property
    def num_out(self) -> int:
        """Blocks of this rank's result, 0 if it gets none."""
        if not contracts.after(self.collective, self.rank, self._instance):
            return 0
        return self.size if self.collective in JOINS else 1

    @property
    def in_counts(self) -> list[int]:
        """Elements of each block of this rank's input."""
        if self.counts is None:
            return [self.block] * self.num_in
        sent = self.counts[self.rank]
        return _blocks(self.num_in, self.counts if isinstance(sent, int) else sent, self.rank)

    @property
    def out_counts(self) -> list[int]:
        """Elements of each block of this rank's result."""
        if self.counts is None:
            return [self.block] * self.num_out
        columns = [c if isinstance(c, int) else c[self.rank] for c in self.counts]
        return _blocks(self.num_out, columns, self.rank)

    @property
    def _instance(self) -> contracts.Case:
        return contracts.Case(self.size, self.root)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the collective besides its arrays."""
        promise = SPECS[self.collective]
        settings: dict[str, Any] = {"root": self.root} if promise.is_rooted else {}
        settings |= {"op": self.op} if promise.is_reduction else {}
        return settings if self.counts is None else settings | {"counts": self.counts}


def _blocks(number: int, counts: Any, rank: int) -> list[int]:
    """Return the elements of all blocks of a buffer, of its only block, or of none."""
    return [counts[rank]] if number == 1 else list(counts) if number else []


class Buffers(NamedTuple):
    """The input and the output of one rank; None where it has none."""

    x: Array | None
    y: Array | None
    is_in_place: bool


def out_of_place(case: Case) -> Buffers | None:
    """Return input and output in separate memory; None for a broadcast, in place in MPI."""
    if case.collective == "broadcast":
        return None
    return Buffers(_empty(case, case.in_counts), _empty(case, case.out_counts), is_in_place=False)


def in_place(case: Case) -> Buffers | None:
    """Return input and output in the same memory: the smaller is this rank's block of the larger.

    None for a barrier, which has neither, and for an all-to-all of uneven blocks.
    """
    is_uneven = case.counts is not None
    if case.collective == "barrier" or (case.collective == "all_to_all" and is_uneven):
        return None
    whole = _empty(case, max(case.in_counts, case.out_counts, key=len))
    own = _own_block(case, whole)
    x, y = (
        None if num_blocks == 0 else own if num_blocks == 1 else whole
        for num_blocks in (case.num_in, case.num_out)
    )
    return Buffers(x, y, is_in_place=True)


def _empty(case: Case, counts: Sequence[int]) -> Array | None:
    return case.backend.empty((sum(counts),), case.dtype) if counts else None


def _own_block(case: Case, whole: Array | None) -> Array | None:
    """Return the block named after this rank, or all of a buffer that is one block."""
    counts = max(case.in_counts, case.out_counts, key=len)
    if whole is None or len(counts) == 1:
        return whole
    return whole[sum(counts[: case.rank]) :][: counts[case.rank]]


class Check:
    """The input and the right result of a rank, made once for all runs of a case."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._input = _filled(case, case.in_counts, _input)
        self._result = _filled(case, case.out_counts, _result)

    def prepare(self, buffers: Buffers) -> None:
        """Poison the output, and write the input."""
        if buffers.y is not None:
            buffers.y.fill(POISON)
        if buffers.x is not None:
            _write(self._case.backend, self._input, buffers.x)

    def num_wrong(self, result: Array | None) -> int:
        """Return how many elements of this rank's result differ from the oracle's."""
        if result is None:
            return 0
        return int(np.count_nonzero(_on_host(self._case.backend, result) != self._result))


def _filled(case: Case, counts: Sequence[int], values: Callable[[Case, slice], Array]) -> Array:
    """Return a buffer of so many blocks with its values."""
    x = np.empty(sum(counts), case.dtype)
    if x.size:
        for columns_of_x, columns in _windows(x, case, len(counts)):
            columns_of_x[...] = values(case, columns).reshape(columns_of_x.shape)
    return x


def _write(backend: Backend, source: Array, x: Array) -> None:
    """Copy from the host to an array of a backend."""
    if backend.is_host:
        x[...] = source
    else:
        backend.to_device([(x, HOST.host_buffer(source))])


def _on_host(backend: Backend, x: Array) -> Array:
    """Return an array of a backend, or its copy, on the host."""
    if backend.is_host:
        return x
    copied = np.empty(x.shape, x.dtype)
    backend.to_host([(x, HOST.host_buffer(copied))])
    backend.synchronize()
    return copied


def _windows(x: Array, case: Case, num_blocks: int) -> Iterator[tuple[Array, slice]]:
    """Yield columns of a buffer, and their numbers; all of it at once if blocks are uneven."""
    if case.counts is not None:
        yield x, slice(0, x.size)
        return
    matrix = x.reshape(num_blocks, case.block)
    for start in range(0, case.block, WINDOW):
        columns = slice(start, min(start + WINDOW, case.block))
        yield matrix[:, columns], columns


def _input(case: Case, columns: slice) -> Array:
    """Return a rank's input in these columns: small integers, of which every combination is exact.

    Sums stay exact in bfloat16 up to 85 ranks; products are powers of two.
    """
    low, high = _range(case)
    random = np.random.default_rng((case.rank, columns.start))
    width = columns.stop - columns.start
    size = case.num_in * width if case.counts is None else sum(case.in_counts)
    return random.integers(low, high, size, np.int8).astype(case.dtype)


def _range(case: Case) -> tuple[int, int]:
    if case.dtype.kind == "b":
        return 0, 2
    if not SPECS[case.collective].is_reduction:
        return 0, 64
    return (1, 3) if case.op == "prod" else (0, 4)


def _result(case: Case, columns: slice) -> Array:
    """Return this rank's result in these columns, computed from every rank's input."""
    cases = [case._replace(rank=rank) for rank in range(case.size)]
    inputs = [_input(other, columns) for other in cases]
    every = expected(case.collective, inputs, op=case.op, root=case.root, counts=case.counts)
    result = every[case.rank]
    assert result is not None, "only ranks that get a result are asked for it"
    return result
