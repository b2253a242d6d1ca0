"""Operators of the caller's own: applied in rank order, to anything, wherever it lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator, Operator
from collectives.algorithms import info, names
from tests.fakes.device import BACKEND, on_device, on_host
from tests.scenarios.jobs import REDUCTIONS, Job, same
from tests.scenarios.operators import (
    FALSELY_COMMUTATIVE,
    MULTIPLY,
    OVERWRITING,
    into_left,
    matrices,
    multiply,
    multiply_serially,
    ordered_jobs,
    perform_in_order,
    refuse_to_overwrite,
)


def on_threads(jobs: list[Job]) -> None:
    def every(comm: Communicator) -> None:
        for job in jobs:
            perform_in_order(comm, job)

    collectives.run(every, jobs[0].size, timeout=60)


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.slow
def test_an_operator_that_is_not_commutative_is_applied_in_rank_order(size: int) -> None:
    on_threads(ordered_jobs(size))


@pytest.mark.parametrize("collective", REDUCTIONS)
@pytest.mark.parametrize("size", [3, 4])
def test_large_arrays_are_combined_in_rank_order_too(collective: str, size: int) -> None:
    on_threads([Job(collective, None, size, 20_000, op=MULTIPLY, root=1)])


def test_an_operator_that_is_applied_out_of_order_is_noticed() -> None:
    job = Job("reduce_scatter", "ring", 4, 11, op=FALSELY_COMMUTATIVE)
    with pytest.raises(AssertionError, match="wanted"):
        on_threads([job])


def test_the_operator_of_these_tests_is_associative_and_not_commutative() -> None:
    a, b, c = (matrices(rank, 11) for rank in range(3))
    same(multiply(multiply(a, b), c), multiply(a, multiply(b, c)), "associative")
    same(multiply(a, b), multiply_serially(a, b), "as written out")
    assert not np.any(multiply(a, b) == multiply(b, a))


def test_elements_may_be_records() -> None:
    record = np.dtype([("value", "f8"), ("rank", "i8")])
    least = Operator.from_function(
        lambda left, right: np.where(left["value"] <= right["value"], left, right), name="min_loc"
    )

    def body(comm: Communicator) -> Any:
        x = np.zeros(3, record)
        x["value"], x["rank"] = [comm.rank, -comm.rank, 7], comm.rank
        return comm.all_reduce(x, least)["rank"].tolist()

    assert collectives.run(body, 4) == [[0, 3, 0]] * 4


def test_a_numpy_function_can_be_an_operator() -> None:
    hypot = Operator.from_function(np.hypot, commutative=True)
    assert hypot.name == "hypot"
    (y, _) = collectives.run(lambda comm: comm.all_reduce(np.array([3.0 + comm.rank]), hypot), 2)
    assert y.tolist() == [5.0]


def test_an_operator_runs_asynchronously_and_as_a_plan() -> None:
    def body(comm: Communicator) -> None:
        inputs = [matrices(rank, 5) for rank in range(comm.size)]
        x = inputs[comm.rank]
        want = multiply_serially(multiply_serially(inputs[0], inputs[1]), inputs[2])
        works = [comm.all_reduce(x, MULTIPLY, async_op=True) for _ in range(3)]
        plan = comm.plan.all_reduce(x, MULTIPLY)
        for result in [plan.run(), plan.run(), *(work.wait() for work in works)]:
            same(result, want, "product")

    collectives.run(body, 3)


def test_an_operator_runs_on_the_device() -> None:
    job = Job("all_reduce", "recursive_doubling", 2, 11, op=MULTIPLY)
    BACKEND.reset()
    collectives.run(lambda comm: perform_in_order(comm, job, on_device, on_host), 2)
    assert BACKEND.num_combined == 4, "each rank tries it once and combines once"


def test_what_works_on_one_element_only_is_told_when_it_fails() -> None:
    first = Operator.from_function(lambda left, right: (left + right)[:1], name="first")
    with pytest.raises(TypeError, match=r"'first' returns numpy float64 of shape \(1,\) for two"):
        collectives.run(lambda comm: comm.all_reduce(np.ones(4), first), 2)


@pytest.mark.parametrize("function", OVERWRITING)
def test_an_operator_that_changes_its_operands_is_refused(function: Any) -> None:
    collectives.run(lambda comm: refuse_to_overwrite(comm, function), 3)


@pytest.mark.parametrize("algorithm", [*names("all_reduce")])
def test_an_operator_that_changes_its_operands_later_fails_and_changes_nothing(
    algorithm: str,
) -> None:
    def later(left: Any, right: Any) -> Any:
        return into_left(left, right) if left.size > 1 else left + right

    op, inputs = Operator.from_function(later, commutative=True), [np.full(64, r) for r in range(4)]
    with pytest.raises(ValueError, match="op 'later' must not change its operands"):
        collectives.run(lambda comm: comm.all_reduce(inputs[comm.rank], op, algorithm=algorithm), 4)
    assert [x.tolist() for x in inputs] == [[r] * 64 for r in range(4)]


@pytest.mark.parametrize("function", OVERWRITING)
def test_on_a_device_an_operator_gets_copies_that_it_may_change(function: Any) -> None:
    op = Operator.from_function(function, commutative=True)

    def body(comm: Communicator) -> None:
        x = on_device(np.full(7, comm.rank + 1.0))
        for algorithm in names("all_reduce"):
            if info("all_reduce", algorithm).serves(comm.size):
                y = comm.all_reduce(x, op, algorithm=algorithm)
                same(on_host(y), np.full(7, 6.0), algorithm)
                same(on_host(x), np.full(7, comm.rank + 1.0), algorithm)

    collectives.run(body, 3)


def test_an_operator_may_return_its_operands_or_views_of_them() -> None:
    first = Operator.from_function(lambda left, right: left, name="first")
    last = Operator.from_function(lambda left, right: right[::-1][::-1], name="last")

    def body(comm: Communicator) -> None:
        x = np.arange(5.0) + 10 * comm.rank
        same(comm.all_reduce(x, first), np.arange(5.0), "first")
        same(comm.all_reduce(x, last), np.arange(5.0) + 20, "last")
        same(comm.scan(x, last, out=x), np.arange(5.0) + 10 * comm.rank, "in place")

    collectives.run(body, 3)


def test_empty_arrays_need_no_operator_that_can_serve_them() -> None:
    def fail(left: Any, right: Any) -> Any:
        raise AssertionError("there is nothing to combine")

    fails = Operator.from_function(fail)
    assert collectives.run(lambda comm: comm.all_reduce(np.ones(0), fails).size, 3) == [0] * 3


def test_only_a_function_makes_an_operator() -> None:
    with pytest.raises(TypeError, match="needs a function of two arrays, not 'sum'"):
        Operator.from_function("sum")  # type: ignore[arg-type]
