"""The compiled loop and the interpreter do the same with every program, row by row, bit by bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator, algorithms
from collectives.arrays.backends import HOST, Arrays
from collectives.arrays.operators import operator
from collectives.diagnostics import Waiting
from collectives.engines.compiled import CompiledExecution
from collectives.engines.interpreter import Interpreted
from collectives.engines.transport import Execution, Operands
from collectives.programs.program import Kind, Program, Row, compile_call
from collectives.runtime import performing
from collectives.schedule.contracts import SPECS
from collectives.schedule.layout import even_counts
from tests.scenarios.jobs import ALGORITHMS, variants
from tests.scenarios.wrong_programs import (
    WRONG,
    compiling_with,
    require_comparison_at_every_attachment,
    require_refusal,
)

pytestmark = pytest.mark.mpi


@pytest.fixture
def comms(mpi_world: MPI.Intracomm) -> Iterator[tuple[Communicator, Communicator]]:
    made = tuple(collectives.wrap(mpi_world, check=False) for _ in range(2))
    yield made
    for comm in made:
        comm.free()


def shapes(collective: str, comm: Communicator, root: int) -> tuple[Any, int | None, int | None]:
    """Counts, and the elements of input and output; None where this rank has none."""
    p, rank, n = comm.size, comm.rank, 37
    if SPECS[collective].has_pieces:
        has_input = collective != "broadcast" or rank == root
        has_output = {"reduce": rank == root, "exscan": rank > 0}.get(collective, True)
        return n, n if has_input else None, n if has_output else None
    counts = even_counts(n, p)
    if collective == "all_to_all":
        table = tuple(tuple(counts[(s + d) % p] for d in range(p)) for s in range(p))
        return table, sum(table[rank]), sum(row[rank] for row in table)
    whole, is_root = sum(counts), rank == root
    return {
        "scatter": (counts, whole if is_root else None, counts[rank]),
        "gather": (counts, counts[rank], whole if is_root else None),
        "all_gather": (counts, counts[rank], whole),
        "reduce_scatter": (counts, whole, counts[rank]),
    }[collective]


class Both:
    """A program on two communicators, run by the compiled loop and by the interpreter."""

    def __init__(self, comms: tuple[Communicator, Communicator], collective: str, label: str):
        self.comm = comms[0]
        counts, num_in, num_out = shapes(collective, self.comm, root := self.comm.size - 1)
        op = operator("sum", collective) if SPECS[collective].is_reduction else None
        draw = np.random.default_rng(self.comm.rank)
        x = None if num_in is None else draw.random(num_in, np.float32)
        self.program, self.buffers, executions = None, [], []
        for comm in comms:
            out = None if num_out is None else np.zeros(num_out, np.float32)
            arrays = Arrays(HOST, None if x is None else x.copy(), out)
            session = comm._session
            where = {"root": root} if SPECS[collective].is_rooted else {}
            spec = session.spec(collective, arrays, counts, op=op, algorithm=label, **where)
            self.program = compile_call(spec, comm.rank, comm.size)
            operands = Operands.of(arrays, self.program.num_scratch, op, comm.size)
            operands.scratch[:] = 0
            executions.append((session.transport, operands))
            self.buffers.append([operands.input, operands.output, operands.scratch])
        transport, operands = executions[0]
        self.compiled = CompiledExecution(transport.port, self.program, operands, 5)
        transport, operands = executions[1]
        self.interpreted = Interpreted(self.program, operands, transport.messages(5))

    def rows(self) -> Iterator[Row]:
        """Every row, after both have run it."""
        for number, row in enumerate(self.program.listed):
            self.compiled.state[self.compiled._names.NUM_ROWS] = number + 1
            self.interpreted.program = upto(self.program, number + 1)
            for execution in (self.compiled, self.interpreted):
                while not execution.advance(1e-3):
                    pass
                assert execution.row == number + 1
            yield row

    def written(self, row: Row) -> list[tuple[int, int, int]]:
        """Buffer, first and last byte of what a row has filled."""
        if row.kind in (Kind.COPY, Kind.COMBINE, Kind.DIVIDE):
            return [(row.buffer, row.offset, row.offset + row.size)]
        if row.kind != Kind.WAIT:
            return []
        posted = {
            r.slot: r
            for r in self.program.listed[: self.compiled.row]
            if r.kind in (Kind.RECEIVE, Kind.SEND)
        }
        filled = [posted[slot] for slot in range(row.slot, row.slot + row.peer)]
        return [(r.buffer, r.offset, r.offset + r.size) for r in filled]

    def differences(self) -> Iterator[str]:
        for row in self.rows():
            for buffer, start, stop in self.written(row):
                ours, theirs = (b[buffer].view(np.uint8)[start:stop] for b in self.buffers)
                if not np.array_equal(ours, theirs):
                    yield f"{row}: {ours.tobytes().hex()} and {theirs.tobytes().hex()}"


def upto(program: Program, number: int) -> Program:
    """The first rows of a program."""
    return replace(program, rows=program.rows[:number])


@pytest.mark.parametrize(("collective", "name"), ALGORITHMS)
def test_both_do_the_same_row_by_row(
    comms: tuple[Communicator, Communicator], collective: str, name: str
) -> None:
    for label in variants(collective, name, comms[0].size):
        both = Both(comms, collective, label)
        assert list(both.differences()) == [], label
        assert both.compiled.row == both.interpreted.row == len(both.program.rows)


def test_a_row_that_is_run_otherwise_is_noticed(
    comms: tuple[Communicator, Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    if comms[0].size == 1:
        return
    right = Interpreted.wait

    def wrong(self: Interpreted, row: Row) -> bool:
        is_over = right(self, row)
        self.memory.view(1, 0, 4)[0] += is_over
        return is_over

    monkeypatch.setattr(Interpreted, "wait", wrong)
    both = Both(comms, "all_reduce", "recursive_doubling")
    differences = list(both.differences())
    assert differences


def test_every_algorithm_was_compiled() -> None:
    assert len(ALGORITHMS) >= 80
    assert {c for c, _ in ALGORITHMS} == set(SPECS) - {"barrier"}
    assert algorithms.names("barrier")


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_program_is_refused_before_it_runs(
    world: Communicator, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, sentence = WRONG[wrong]
    monkeypatch.setattr(performing, "compile_call", compiling_with(row))
    require_refusal(world, np.copy, sentence)


def test_arrays_that_an_execution_gets_later_are_compared_too(world: Communicator) -> None:
    require_comparison_at_every_attachment(world, np.copy)


@pytest.mark.parametrize("name", ["compiled", "interpreted"])
def test_another_thread_may_ask_where_an_execution_waits(
    comms: tuple[Communicator, Communicator], mpi_world: MPI.Intracomm, name: str
) -> None:
    """Rank 0 begins before the others; the requests that it has posted are known by their row."""
    execution = getattr(Both(comms, "all_reduce", "ring"), name)
    if mpi_world.rank == 0 and mpi_world.size > 1:
        other = threading.Thread(target=advance, args=(execution,))
        other.start()
        try:
            wait_until(lambda: execution.position()[1] != [])
            number, waiting = execution.position()
        finally:
            mpi_world.Barrier()
            other.join()
        assert number == 0 and Waiting(mpi_world.size - 1, is_receive=True) in waiting
        assert execution.position() == (execution.program.num_rounds, [])
    else:
        mpi_world.Barrier()
        while not execution.advance(1e-3):
            pass


def advance(execution: Execution) -> None:
    """Complete an execution, which waits in the engine for as long as possible."""
    while not execution.advance(10.0):
        time.sleep(1e-3)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_messages_that_have_come_are_not_waited_for_once_that_is_noted(
    comms: tuple[Communicator, Communicator], mpi_world: MPI.Intracomm
) -> None:
    """Rank 0 needs a block of every other rank in one round; the last rank is late."""
    if mpi_world.size < 3:
        return
    last = mpi_world.size - 1
    both = Both(comms, "all_to_all", "linear")
    executions = both.compiled, both.interpreted
    if mpi_world.rank == last:
        mpi_world.Barrier()
    for execution in executions:
        execution.advance(0.0)
    if mpi_world.rank == 0:
        try:
            for execution in executions:
                wait_until(lambda execution=execution: noted_receives(execution) == [last])
        finally:
            mpi_world.Barrier()
    elif mpi_world.rank != last:
        mpi_world.Barrier()
    for execution in executions:
        while not execution.advance(1e-3):
            pass
        assert receives(execution) == []


def noted_receives(execution: Execution) -> list[int]:
    """The ranks from which messages are missing, according to the engine."""
    execution.note_completed()
    return receives(execution)


def receives(execution: Execution) -> list[int]:
    """The ranks from which messages are missing."""
    return [peer for peer, is_receive in execution.position()[1] if is_receive]
