"""Wrong input is served correctly or refused with a sentence, before any message is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import collectives
from collectives import Communicator, Operator

P = 3
X = np.arange(6.0)
Call = Callable[[Communicator], Any]


def own(function: Any) -> Operator:
    """An operator that is not said to be commutative."""
    return Operator.from_function(function, name="f")


def refused(error: type[Exception], sentence: str, call: Call) -> None:
    """Every rank refuses, nothing is sent, and the communicator works afterwards."""

    def body(comm: Communicator) -> None:
        with comm.record() as ledger, pytest.raises(error, match=sentence):
            call(comm)
        assert ledger.rows() == []
        assert comm.all_reduce(np.array([1]))[0] == P

    collectives.run(body, P, timeout=20)


def read_only() -> np.ndarray:
    x = np.zeros(6)
    x.flags.writeable = False
    return x


WRONG: dict[str, tuple[type[Exception], str, Call]] = {
    "a list": (TypeError, "not list; numpy.asarray", lambda c: c.all_reduce([1, 2])),
    "a scalar": (TypeError, "not float", lambda c: c.all_reduce(1.5)),
    "None": (TypeError, "not NoneType", lambda c: c.all_reduce(None)),
    "objects": (TypeError, "Python objects", lambda c: c.all_gather(np.array([{}]))),
    "a masked array": (TypeError, "MaskedArray", lambda c: c.all_reduce(np.ma.ones(3))),
    "a matrix": (TypeError, "matrix", lambda c: c.all_reduce(np.ones((1, 1)).view(np.matrix))),
    "strings summed": (TypeError, "'sum' is not defined", lambda c: c.all_reduce(np.array("a"))),
    "unknown op": (ValueError, "unknown op 'add'; known: sum", lambda c: c.all_reduce(X, "add")),
    "op a function": (
        ValueError,
        "unknown op <ufunc 'add'>; .* what collectives.Operator.from_function makes",
        lambda c: c.all_reduce(X, np.add),
    ),
    "the average of a prefix": (
        ValueError,
        "op 'avg' has no meaning for scan; it takes sum, prod, min, max, and, or, xor",
        lambda c: c.scan(X, "avg"),
    ),
    "the average of a prefix without the last": (
        ValueError,
        "op 'avg' has no meaning for exscan",
        lambda c: c.exscan(X, "avg"),
    ),
    "op that returns another dtype": (
        TypeError,
        r"op 'f' returns numpy float32 of shape \(1,\) for two numpy float64 of shape \(1,\)",
        lambda c: c.all_reduce(X, own(lambda a, b: (a + b).astype(np.float32))),
    ),
    "op that returns another shape": (
        TypeError,
        r"op 'f' returns numpy float64 of shape \(\) for two",
        lambda c: c.reduce(X, own(lambda a, b: np.asarray((a + b).sum()))),
    ),
    "op that returns no array": (
        TypeError,
        "what op 'f' returns must be a NumPy or CuPy array, not float64",
        lambda c: c.scan(X, own(lambda a, b: (a + b).sum())),
    ),
    "op that fails": (
        ZeroDivisionError,
        "by zero",
        lambda c: c.reduce_scatter(X, own(lambda a, b: 1 // 0)),
    ),
    "an ordered op on an algorithm that is not": (
        ValueError,
        "reduce_scatter by ring needs a commutative operator; f is not",
        lambda c: c.reduce_scatter(X, own(np.add), algorithm="ring"),
    ),
    "an ordered op on an algorithm with options that is not": (
        ValueError,
        r"reduce by knomial\(radix=3\) needs a commutative operator; f is not",
        lambda c: c.reduce(X, own(np.add), algorithm="knomial(radix=3)"),
    ),
    "xor of floats": (
        TypeError,
        "'xor' is not defined for dtype float64",
        lambda c: c.all_reduce(X, "xor"),
    ),
    "sum of bool": (TypeError, "bool takes and, or, xor", lambda c: c.reduce(X > 1, "sum")),
    "avg of ints": (TypeError, "'avg' is not", lambda c: c.all_reduce(np.arange(3), "avg")),
    "max of complex": (TypeError, "'max' is not", lambda c: c.all_reduce(X + 0j, "max")),
    "root too large": (ValueError, "rank from 0 to 2, got 3", lambda c: c.reduce(X, root=3)),
    "root negative": (ValueError, "got -1", lambda c: c.gather(X, root=-1)),
    "root a float": (TypeError, "must be an integer", lambda c: c.broadcast(X, root=1.0)),
    "root a bool": (TypeError, "must be an integer", lambda c: c.broadcast(X, root=True)),
    "unknown algorithm": (
        ValueError,
        "unknown algorithm 'rign' for all_reduce; known: ring, ",
        lambda c: c.all_reduce(X, algorithm="rign"),
    ),
    "algorithm of another collective": (
        ValueError,
        "unknown algorithm 'bruck' for all_reduce",
        lambda c: c.all_reduce(X, algorithm="bruck"),
    ),
    "algorithm for powers of two": (
        ValueError,
        "all_reduce by swing_latency serves a power of two of ranks only, not 3",
        lambda c: c.all_reduce(X, algorithm="swing_latency"),
    ),
    "algorithm for even numbers": (
        ValueError,
        "serves an even number of ranks only, not 3",
        lambda c: c.reduce_scatter(X, algorithm="swing"),
    ),
    "hosts without ranks": (
        ValueError,
        "broadcast.hierarchical: per_host is at least 1, got 0",
        lambda c: c.broadcast(X, algorithm="hierarchical(per_host=0)"),
    ),
    "algorithm of another type": (
        TypeError,
        "algorithm must be a name or None, not 5",
        lambda c: c.all_reduce(X, algorithm=5),
    ),
    "algorithm that is no name": (
        ValueError,
        "algorithm '' is not a name, or one like 'pipeline",
        lambda c: c.all_reduce(X, algorithm=""),
    ),
    "algorithm left open": (
        ValueError,
        "is not a name",
        lambda c: c.broadcast(X, algorithm="pipeline(segments=8"),
    ),
    "an option without a name": (
        ValueError,
        "'8' is not like 'segments=8'",
        lambda c: c.broadcast(X, algorithm="pipeline(8)"),
    ),
    "an option that is no number": (
        ValueError,
        "'radix=four' is not like",
        lambda c: c.all_gather(X, algorithm="bruck(radix=four)"),
    ),
    "an option that is no whole number": (
        ValueError,
        "'radix=2.5' is not like",
        lambda c: c.all_gather(X, algorithm="bruck(radix=2.5)"),
    ),
    "an option given twice": (
        ValueError,
        "gives radix twice",
        lambda c: c.all_gather(X, algorithm="bruck(radix=2, radix=3)"),
    ),
    "an option that is not": (
        ValueError,
        "all_gather.bruck knows no option 'segments'",
        lambda c: c.all_gather(X, algorithm="bruck(segments=2)"),
    ),
    "an option too small": (
        ValueError,
        "all_gather.bruck: radix is at least 2, got 1",
        lambda c: c.all_gather(X, algorithm="bruck(radix=1)"),
    ),
    "an option below zero": (
        ValueError,
        "segments is at least 1, got -3",
        lambda c: c.broadcast(X, algorithm="pipeline(segments=-3)"),
    ),
    "out of another shape on rank 0, which gets nothing": (
        ValueError,
        r"out has shape \(5,\), the result has \(6,\)",
        lambda c: c.exscan(X, out=np.empty(5)),
    ),
    "out of another shape": (
        ValueError,
        r"out has shape \(5,\), the result has \(6,\)",
        lambda c: c.all_reduce(X, out=np.empty(5)),
    ),
    "out of another dimension": (
        ValueError,
        "out has shape",
        lambda c: c.all_reduce(X, out=np.empty((6, 1))),
    ),
    "out of another dtype": (
        TypeError,
        "out has dtype float32, the result has float64",
        lambda c: c.all_reduce(X, out=np.empty(6, np.float32)),
    ),
    "out not contiguous": (
        ValueError,
        "C-contiguous",
        lambda c: c.all_reduce(X, out=np.empty(12)[::2]),
    ),
    "out in Fortran order": (
        ValueError,
        "C-contiguous",
        lambda c: c.all_reduce(np.ones((2, 3)), out=np.ones((3, 2)).T),
    ),
    "out read-only": (ValueError, "read-only", lambda c: c.all_reduce(X, out=read_only())),
    "out a list": (TypeError, "out must be", lambda c: c.all_reduce(X, out=[0.0] * 6)),
    "counts too few": (
        ValueError,
        "counts has 2 entries for 3 ranks",
        lambda c: c.reduce_scatter(X, counts=[3, 3]),
    ),
    "counts that do not add up": (
        ValueError,
        "add up to 7 rows, the array has 6",
        lambda c: c.reduce_scatter(X, counts=[3, 3, 1]),
    ),
    "counts negative": (ValueError, "negative", lambda c: c.reduce_scatter(X, counts=[7, 0, -1])),
    "counts of floats": (TypeError, "integer", lambda c: c.reduce_scatter(X, counts=[2.0, 2, 2])),
    "counts a number": (TypeError, "sequence of 3", lambda c: c.reduce_scatter(X, counts=6)),
    "counts that belie the array": (
        ValueError,
        r"gives rank \d 5 rows, x has 6",
        lambda c: c.all_gather(X, counts=[5, 5, 5]),
    ),
    "a table that is not square": (
        ValueError,
        "square",
        lambda c: c.all_to_all(X, counts=[[1, 2], [3, 4]]),
    ),
    "a table that belies the array": (
        ValueError,
        "add up to 3",
        lambda c: c.all_to_all(X, counts=np.ones((3, 3), int)),
    ),
    "0-d scattered": (ValueError, "0-d array has none", lambda c: c.reduce_scatter(np.array(1.0))),
    "0-d exchanged": (ValueError, "0-d array has none", lambda c: c.all_to_all(np.array(1.0))),
    "a send to oneself": (ValueError, "wait for itself", lambda c: c.send(X, c.rank)),
    "a peer that is not": (ValueError, "rank from 0 to 2", lambda c: c.recv(np.empty(3), 7)),
    "a negative tag": (ValueError, "tag must be from 0", lambda c: c.send(X, (c.rank + 1) % P, -1)),
    "receiving into a list": (TypeError, "must be a", lambda c: c.recv([0], (c.rank + 1) % P)),
    "receiving into the sent": (
        ValueError,
        "shares memory",
        lambda c: c.send_recv(X, c.rank, c.rank, out=X),
    ),
    "a subgroup without me": (ValueError, "not in", lambda c: c.subgroup([(c.rank + 1) % P])),
    "a subgroup with a twin": (ValueError, "twice", lambda c: c.subgroup([c.rank, c.rank])),
    "a negative color": (ValueError, "negative", lambda c: c.split(-2)),
    "an asynchronous plan": (TypeError, "start", lambda c: c.plan.all_reduce(X, async_op=True)),
    "a time limit that is text": (TypeError, "timeout must be", lambda c: c.barrier(timeout="5")),
    "a time limit of nan": (ValueError, "timeout", lambda c: c.all_reduce(X, timeout=float("nan"))),
    "a negative time limit": (ValueError, "timeout", lambda c: c.barrier(timeout=-1)),
    "a color beyond 64 bits": (ValueError, "64 bits", lambda c: c.split(2**70)),
    "a ragged table": (
        ValueError,
        "entries for 3 ranks",
        lambda c: c.all_to_all(X, counts=[[1, 2, 3], [4, 5], [6, 7, 8]]),
    ),
    "a foreign float": (
        TypeError,
        "'sum' is not defined for dtype float8_e5m2",
        lambda c: c.all_reduce(np.ones(3, ml_dtypes.float8_e5m2)),
    ),
    "broadcast into a list": (
        TypeError,
        "x must be",
        lambda c: c.broadcast([1.0], root=(c.rank + 1) % P),
    ),
    "broadcast into a strided array": (
        ValueError,
        "C-contiguous",
        lambda c: c.broadcast(X[::2], root=(c.rank + 1) % P),
    ),
    "scatter into a 0-d array": (
        ValueError,
        "0-d array has none",
        lambda c: c.scatter(out=np.array(1.0), root=(c.rank + 1) % P),
    ),
    "all-to-all into a list": (
        TypeError,
        "out must be",
        lambda c: c.all_to_all(X, counts=[2, 2, 2], out=[1]),
    ),
    "all-to-all into another dtype": (
        TypeError,
        "out has dtype float32, the result has float64",
        lambda c: c.all_to_all(X, counts=[2, 2, 2], out=np.empty(6, np.float32)),
    ),
    "all-to-all into rows of another shape": (
        ValueError,
        r"out has shape \(6, 1\)",
        lambda c: c.all_to_all(X, counts=[2, 2, 2], out=np.empty((6, 1))),
    ),
    "broadcast into a string": (TypeError, "out must be", lambda c: c.broadcast(X, out="y")),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_refused_before_anything_is_sent(what: str) -> None:
    refused(*WRONG[what])


ARRAY_CALLS = [
    "broadcast",
    "scatter",
    "gather",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "scan",
    "exscan",
]
WRONG_EVERYWHERE: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "unknown algorithm": (ValueError, "unknown algorithm 'none'", {"algorithm": "none"}),
    "time limit": (TypeError, "timeout must be", {"timeout": "1"}),
    "output": (TypeError, "out must be", {"out": "y"}),
    "input": (TypeError, "must be a NumPy or CuPy array", {"x": "x"}),
}


@pytest.mark.parametrize("what", WRONG_EVERYWHERE)
@pytest.mark.parametrize("collective", ARRAY_CALLS)
def test_every_collective_refuses_wrong_arguments(collective: str, what: str) -> None:
    error, sentence, keywords = WRONG_EVERYWHERE[what]
    rooted = collective in ("broadcast", "scatter", "gather", "reduce")

    def call(comm: Communicator) -> Any:
        arguments = {"x": X} | ({"root": comm.rank} if rooted else {}) | keywords
        return getattr(comm, collective)(**arguments)

    refused(error, sentence, call)


@pytest.mark.parametrize("collective", ["broadcast", "scatter"])
def test_a_plan_that_is_refused_sends_no_header(collective: str) -> None:
    refused(TypeError, "start", lambda c: getattr(c.plan, collective)(X, async_op=True))


def served(want: Any, call: Call) -> None:
    for got in collectives.run(call, P, timeout=20):
        assert np.array_equal(got, want)


@pytest.mark.parametrize("limit", [float("inf"), 1e300, 10**400])
def test_a_time_limit_may_be_infinite(limit: float) -> None:
    def body(comm: Communicator) -> Any:
        comm.barrier(timeout=limit)
        comm.plan.barrier().run(limit)
        return comm.all_reduce(X, async_op=True, timeout=limit).wait(limit)

    served(X * P, body)


def test_a_bad_time_limit_of_a_wait_is_refused_and_a_good_one_serves() -> None:
    def body(comm: Communicator) -> Any:
        plan, work = comm.plan.all_reduce(X), comm.all_reduce(X, async_op=True)
        for wait in (plan.run, work.wait):
            for limit, error in (("1", TypeError), (-1, ValueError)):
                with pytest.raises(error, match="timeout must"):
                    wait(limit)  # type: ignore[arg-type]
        assert not plan.is_active
        work.wait()
        return plan.run(30)

    served(X * P, body)


def test_strided_input_is_served() -> None:
    served(X[::2] * P, lambda c: c.all_reduce(X[::2]))
    served(X[::-1] * P, lambda c: c.all_reduce(X[::-1]))


def test_fortran_ordered_input_is_served_in_logical_order() -> None:
    x = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    served(np.concatenate([x, x, x]), lambda c: c.all_gather(x))
    served(x * P, lambda c: c.all_reduce(x))


def test_read_only_input_is_served() -> None:
    x = np.broadcast_to(np.array(2.0), (4,))
    served(np.full(4, 2.0 * P), lambda c: c.all_reduce(x))


def test_a_memory_map_is_served(tmp_path: Any) -> None:
    np.save(tmp_path / "x.npy", X)
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    served(X * P, lambda c: c.all_reduce(x))


@pytest.mark.parametrize("shift", [1, 2, 5])
def test_overlapping_in_and_output_is_served(shift: int) -> None:
    def body(comm: Communicator) -> Any:
        memory = np.arange(20.0)
        comm.all_reduce(memory[:10], out=memory[shift : 10 + shift], algorithm="ring")
        return memory[shift : 10 + shift]

    served(np.arange(10.0) * P, body)


def test_overlap_at_an_odd_address_is_served() -> None:
    def body(comm: Communicator) -> Any:
        memory = np.zeros(100, np.uint8)
        x, y = memory[:80].view(np.float64), memory[4:84].view(np.float64)
        x[...] = np.arange(10.0)
        return comm.all_reduce(x, out=y, algorithm="ring").copy()

    served(np.arange(10.0) * P, body)


def test_all_to_all_in_place_is_served() -> None:
    def body(comm: Communicator) -> Any:
        x = np.arange(P) * 10 + comm.rank
        comm.all_to_all(x, out=x)
        return x - 10 * comm.rank

    served(np.arange(P), body)


@pytest.mark.parametrize(
    "collective", ["all_reduce", "reduce", "all_gather", "gather", "broadcast", "scan"]
)
def test_zero_dimensional_arrays_are_served(collective: str) -> None:
    def body(comm: Communicator) -> Any:
        return getattr(comm, collective)(np.array(2.5))

    scalars = {"all_reduce": 2.5 * P, "reduce": 2.5 * P, "broadcast": 2.5, "scan": 2.5}
    got = collectives.run(body, P)[0]
    expected = np.array(scalars.get(collective, [2.5] * P))
    assert got.shape == expected.shape and np.array_equal(got, expected)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_empty_arrays_are_served(shape: tuple[int, ...]) -> None:
    x = np.empty(shape)
    served(x, lambda c: c.all_reduce(x))
    served(x, lambda c: c.broadcast(x))
    assert collectives.run(lambda c: c.all_gather(x), P)[0].shape == (shape[0] * P, *shape[1:])


def test_big_endian_arrays_are_served() -> None:
    x = np.arange(6, dtype=">f8")
    served(x * P, lambda c: c.all_reduce(x))


def test_structured_arrays_can_be_moved_but_not_announced() -> None:
    x = np.zeros(6, [("a", "i4"), ("b", "f8")])
    served(np.concatenate([x, x, x]), lambda c: c.all_gather(x))

    def body(comm: Communicator) -> Any:
        return comm.broadcast(x.copy(), out=np.empty_like(x))

    served(x, body)
    with pytest.raises(ValueError, match="a header cannot describe"):
        collectives.run(lambda c: c.broadcast(x), P, timeout=20)


def test_exscan_leaves_the_output_of_rank_0_as_it_is() -> None:
    def body(comm: Communicator) -> Any:
        x, y = X.copy(), np.full(6, -1.0)
        got = comm.exscan(x, out=x), comm.exscan(X, out=y)
        assert all((result is None) == (comm.rank == 0) for result in got)
        return x, y

    (x0, y0), (x1, y1), (x2, y2) = collectives.run(body, P)
    assert np.array_equal(x0, X) and np.array_equal(y0, np.full(6, -1.0))
    assert np.array_equal(x1, X) and np.array_equal(y1, X)
    assert np.array_equal(x2, 2 * X) and np.array_equal(y2, 2 * X)


# Scatter and broadcast: who knows the shape


def test_without_out_a_header_tells_the_shape_and_stands_in_the_ledger() -> None:
    def body(comm: Communicator) -> Any:
        with comm.record() as ledger:
            y = comm.broadcast(X if comm.rank == 0 else None)
            z = comm.scatter(X if comm.rank == 0 else None, algorithm="linear")
        return y, z, ledger.gather()

    results = collectives.run(body, P)
    assert all(np.array_equal(y, X) and z.shape == (2,) for y, z, _ in results)
    by_collective = results[0][2].summary(by=("collective",))
    assert by_collective[("header",)].bytes == 2 * 256 + 2 * (256 + 8 * P)
    assert by_collective[("broadcast",)].bytes == 2 * 48
    assert by_collective[("scatter",)].bytes == 2 * 16


def test_with_out_no_header_is_sent() -> None:
    def body(comm: Communicator) -> Any:
        with comm.record() as ledger:
            comm.broadcast(X if comm.rank == 0 else None, out=np.empty(6))
            comm.scatter(X if comm.rank == 0 else None, out=np.empty(2))
            comm.scatter(
                X if comm.rank == 0 else None, out=np.empty(comm.rank + 1), counts=[1, 2, 3]
            )
        return ledger.gather()

    kinds = collectives.run(body, P)[0].summary(by=("collective",))
    assert set(kinds) == {("broadcast",), ("scatter",)}


def test_broadcast_fills_the_array_it_is_given() -> None:
    def body(comm: Communicator) -> Any:
        x = X.copy() if comm.rank == 1 else np.zeros(6)
        assert comm.broadcast(x, root=1) is x
        return x

    served(X, body)


def test_broadcast_into_an_array_that_does_not_fit_is_refused() -> None:
    def body(comm: Communicator) -> Any:
        comm.broadcast(X if comm.rank == 0 else np.zeros(5))

    with pytest.raises(ValueError, match="the root sends float64 of shape"):
        collectives.run(body, P, timeout=20)


def test_scatter_with_out_of_unequal_parts_asks_for_counts() -> None:
    def body(comm: Communicator) -> Any:
        comm.scatter(np.arange(7.0) if comm.rank == 0 else None, out=np.empty(2))

    with pytest.raises(ValueError, match="7 rows cannot be divided equally among 3 ranks"):
        collectives.run(body, P, timeout=20)


def test_scatter_counts_that_differ_between_ranks_are_refused() -> None:
    def body(comm: Communicator) -> Any:
        comm.scatter(X if comm.rank == 0 else None, counts=[2, 2, 2] if comm.rank else [1, 2, 3])

    with pytest.raises(ValueError, match="at the root"):
        collectives.run(body, P, timeout=20)


def test_all_to_all_exchanges_counts_only_if_it_must() -> None:
    table = [[1, 2, 3], [0, 0, 6], [2, 2, 2]]

    def body(comm: Communicator, counts: Any) -> Any:
        with comm.record() as ledger:
            y = comm.all_to_all(X, counts=counts)
        return y.size, {row.collective for row in ledger.rows()}

    for rank, (size, kinds) in enumerate(collectives.run(lambda c: body(c, table[c.rank]), P)):
        assert size == sum(row[rank] for row in table)
        assert kinds == {"counts", "all_to_all"}
    for _, kinds in collectives.run(lambda c: body(c, table), P):
        assert kinds == {"all_to_all"}


def test_sizes_that_differ_between_ranks_are_noticed() -> None:
    with pytest.raises(collectives.CollectiveMismatch, match="the same call with the same sizes"):
        collectives.run(lambda c: c.all_reduce(np.ones(3 + c.rank)), P, timeout=20)
