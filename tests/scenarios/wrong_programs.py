"""Programs that reach outside the arrays of their calls, which no engine may run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.arrays.backends import Arrays, backend_of
from collectives.arrays.operators import operator
from collectives.engines import Operands
from collectives.programs import INPUT, OUTPUT, SCRATCH, CallSpec, Kind, Program, Row, compile_call
from collectives.schedule import ScheduleError
from collectives.selection import programs
from tests.inside import transport_of

NUM = 1000  # elements
LABEL = "reduce_broadcast"  # which the library does not use for itself

# What is wrong with the rows -> the sentence.
WRONG: dict[str, tuple[Row, str]] = {
    "input": (Row(Kind.COPY, 0, 0, OUTPUT, 0, 8, 0, INPUT, 8 * NUM), "8008 bytes of input"),
    "output": (Row(Kind.DIVIDE, 0, 0, OUTPUT, 8 * NUM - 4, 8), "8004 bytes of output"),
    "scratch": (Row(Kind.SEND, 0, 0, SCRATCH, 2**40, 8), "bytes of scratch"),
    "right": (Row(Kind.COMBINE, 0, 0, OUTPUT, 0, 8, 0, INPUT, 0, INPUT, 2**40), "bytes of input"),
    "before": (Row(Kind.RECEIVE, 0, 0, OUTPUT, -8, 8), "begins before a buffer"),
    "kind": (Row(9, 0, 0, OUTPUT, 0, 8), "unknown kind of row"),
    "buffer": (Row(Kind.RECEIVE, 0, 0, 3, 0, 8), "unknown buffer"),
    "slot": (Row(Kind.RECEIVE, 0, 0, OUTPUT, 0, 8, 99), "beyond its . slots"),
    "slots": (Row(Kind.WAIT, 0, 0, 0, 0, 99), "beyond its . slots"),
    "receives": (Row(Kind.WAIT, 0, 2, 0, 0, 1), "more receives than messages"),
    "writes": (Row(Kind.COPY, 0, 0, INPUT, 0, 8, 0, OUTPUT, 0), "writes to its input"),
}


def with_row(program: Program, row: Row) -> Program:
    """A program that begins with another row.  It has a slot, also if it sends no message."""
    rows = np.vstack([np.array([row], np.int64), program.rows])
    return replace(program, rows=rows, num_slots=max(program.num_slots, 1))


def compiling_with(row: Row) -> Callable[..., Program]:
    """Compiles programs of LABEL that begin with another row."""

    def compiling(spec: CallSpec, rank: int, size: int) -> Program:
        right = compile_call(spec, rank, size)
        return with_row(right, row) if spec.chosen == LABEL else right

    return compiling


def require_refusal(comm: Communicator, make: Callable[[Any], Any], sentence: str) -> None:
    """No way to make a call runs the program, or sends anything."""
    ways: list[Callable[[Communicator, Any], object]] = [
        lambda part, x: part.all_reduce(x, algorithm=LABEL),
        lambda part, x: part.all_reduce(x, algorithm=LABEL, async_op=True).wait(),
        lambda part, x: part.plan.all_reduce(x, algorithm=LABEL).run(),
    ]
    for call in ways:
        part = comm.split(0)
        assert part is not None
        with part.record() as ledger, pytest.raises(ScheduleError, match=sentence):
            call(part, make(np.ones(NUM)))
        assert not ledger.rows()
        part.free()


def require_comparison_at_every_attachment(comm: Communicator, make: Callable[[Any], Any]) -> None:
    """An execution takes other arrays of the same size, and refuses shorter ones."""
    program = programs("all_reduce", comm.size, NUM, itemsize=8, algorithm=LABEL)[comm.rank]

    def operands(num: int) -> Operands:
        x, out = make(np.ones(num)), make(np.zeros(num))
        arrays, op = Arrays(backend_of(x), x, out), operator("sum", "all_reduce")
        return Operands.of(arrays, program.num_scratch, op)

    execution = transport_of(comm).execution(program, operands(NUM), 0)
    execution.attach(operands(NUM), 0)
    for run in (execution.attach, partial(transport_of(comm).execution, program)):
        with pytest.raises(ScheduleError, match=r"8000 bytes of .*, and is given 7992"):
            run(operands(NUM - 1), 0)
    execution.detach()
