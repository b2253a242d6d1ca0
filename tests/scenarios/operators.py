"""Operators of a caller's own: one that fails, and one that is not commutative.

The latter is the product of matrices, which is compared with a serial one.  An element is a 2x2
matrix of numbers modulo 2**16, packed into a uint64.  All have the determinant 1, so no product
forgets a factor or their order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.workloads.expected import expected
from collectives import Communicator, Operator
from collectives.algorithms import info, names
from tests.scenarios.jobs import REDUCTIONS, ROOTED, Job, call, same, unchanged, variants
from tests.scenarios.on_devices import ToDevice, ToHost


def failing(error: BaseException) -> Operator:
    """An operator that can be rehearsed once and then raises this."""
    num_calls = 0

    def fail(left: Any, right: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:  # the first is the rehearsal
            raise error
        return left

    return Operator.from_function(fail)


def into_right(left: Any, right: Any) -> Any:
    """A sum that overwrites its right operand."""
    return np.add(left, right, out=right)


def into_left(left: Any, right: Any) -> Any:
    """A sum that overwrites its left operand."""
    left += right
    return left


OVERWRITING = [into_right, into_left]


def refuse_to_overwrite(comm: Communicator, function: Any) -> None:
    """Every rank refuses an operator that changes its operands, before it sends anything."""
    op = Operator.from_function(function, commutative=True)
    x, wanted = np.full(7, comm.rank + 1.0), f"op '{function.__name__}' must not change its oper"
    with comm.record() as ledger:
        for call in (comm.all_reduce, comm.reduce, comm.scan, comm.plan.all_reduce):
            with pytest.raises(ValueError, match=wanted):
                call(x, op)
        with pytest.raises(ValueError, match=wanted):
            comm.all_reduce(x, op, out=x, async_op=True)
    assert not ledger.rows()
    same(x, np.full(7, comm.rank + 1.0), function.__name__)


def multiply(left: Any, right: Any) -> Any:
    """The products of packed matrices, on any kind of array."""
    a, b = (x.view(np.uint16).reshape(-1, 2, 2) for x in (left, right))
    return (a @ b).reshape(-1).view(np.uint64)


MULTIPLY = Operator.from_function(multiply, name="matmul")
FALSELY_COMMUTATIVE = Operator.from_function(multiply, name="matmul", commutative=True)


def matrices(rank: int, num_rows: int) -> np.ndarray:
    """This rank's matrices, packed."""
    x, y = np.random.default_rng(rank).integers(0, 2**16, (2, num_rows), dtype=np.uint16)
    ones = np.ones_like(x)
    return np.stack([ones, x, y, ones + x * y], axis=-1).view(np.uint64)[:, 0]


def multiply_serially(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The same products, written out number by number."""
    (a, b, c, d), (e, f, g, h) = (
        x.view(np.uint16).reshape(-1, 4).T.astype(np.uint64) for x in (left, right)
    )
    numbers = [a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h]
    return np.stack(numbers, axis=-1).astype(np.uint16).view(np.uint64)[:, 0]


def perform_in_order(
    comm: Communicator, job: Job, to_device: ToDevice = unchanged, to_host: ToHost = unchanged
) -> None:
    """Make the call and compare its result with the serial product."""
    inputs = [matrices(rank, job.rows) for rank in range(job.size)]
    want = expected(job.collective, inputs, op=multiply_serially, root=job.root)
    got = call(comm, job, to_device(inputs[comm.rank]), to_host)
    same(to_host(got), want[comm.rank], job)


def ordered_jobs(size: int, num_rows: int = 11) -> list[Job]:
    """Every algorithm that promises order, and whatever is chosen by itself, at every root."""
    texts = [
        (collective, text)
        for collective in REDUCTIONS
        for name in names(collective)
        if info(collective, name).is_ordered
        for text in variants(collective, name, size)
    ]
    return [
        Job(collective, text, size, num_rows, op=MULTIPLY, root=root, is_in_place=is_in_place)
        for collective, text in [*texts, *((collective, None) for collective in REDUCTIONS)]
        for root in (range(size) if collective in ROOTED else [0])
        for is_in_place in (False, True)
    ]
