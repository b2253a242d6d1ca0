"""Programs in which ranks differ by mistake; each runs on threads and under MPI.

In every one the last rank is the one that is wrong.  Under plain MPI most of these are silent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from collectives import CollectiveMismatch, Communicator, Operator

Call = Callable[[Communicator], Any]
FLOATS, WHOLE = np.arange(12.0), np.arange(12)


class Mistake(NamedTuple):
    """What the last rank calls where the others call something else, and what all are told.

    `alone`: what happens without checking.  "silent": nothing is noticed, and results are wrong or
    right by luck; "silent at 2": so it is with 2 ranks in one process; "noticed": by a length, by
    an array that does not fit, or by nobody, until a time limit.
    """

    name: str
    wrong: Call
    right: Call
    told: str
    alone: str = "silent"


def _reduced(x: np.ndarray, **how: Any) -> Call:
    return lambda comm: comm.all_reduce(x.copy(), **how)


def _in_place(comm: Communicator) -> Any:
    x = FLOATS.copy()
    return comm.all_reduce(x, out=x)


def _skipping(comm: Communicator) -> Any:
    return comm.all_reduce(FLOATS)


def _not_skipping(comm: Communicator) -> Any:
    comm.barrier()
    return comm.all_reduce(FLOATS)


def _from_rank(root: int) -> Call:
    def call(comm: Communicator) -> Any:
        return comm.broadcast(FLOATS.copy(), root % comm.size, out=np.empty(12))

    return call


def _using(algorithm: str) -> Call:
    def call(comm: Communicator) -> Any:
        with collectives.using(all_reduce=algorithm):
            return comm.all_reduce(FLOATS)

    return call


def _planned(order: int) -> Call:
    """Two plans that look the same, run in this or that order."""

    def call(comm: Communicator) -> Any:
        x = [FLOATS.copy(), 2 * FLOATS]
        plans = [comm.plan.all_reduce(array) for array in x]
        try:
            for plan in plans[::order]:
                plan.run()
        finally:
            for plan in plans:
                plan.free()

    return call


def _added(commutative: bool) -> Operator:
    return Operator.from_function(np.add, name="mine", commutative=commutative)


# The nine of plain MPI, each in more than one form.
MISTAKES = [
    Mistake(
        "a shorter message",
        _reduced(FLOATS[:9], algorithm="ring"),
        _reduced(FLOATS, algorithm="ring"),
        r"called all_reduce\(layout=\(9,\)\).*, .* layout=\(12,\)",
        alone="noticed",
    ),
    Mistake(
        "a longer message",
        _reduced(np.arange(99.0)),
        _reduced(FLOATS),
        r"called all_reduce\(layout=\(99,\)\).*, .* layout=\(12,\)",
        alone="noticed",
    ),
    Mistake(
        "counts of its own",
        lambda comm: comm.reduce_scatter(FLOATS, counts=_counts(comm, 0)),
        lambda comm: comm.reduce_scatter(FLOATS, counts=_counts(comm, comm.size - 1)),
        r"called reduce_scatter\(counts=\[12, 0.*counts=\[0, .*12\]",
        alone="noticed",
    ),
    Mistake(
        "a table of its own",
        lambda comm: comm.all_to_all(_rows(comm, 2), counts=_table(comm, 2)),
        lambda comm: comm.all_to_all(_rows(comm, 1), counts=_table(comm, 1)),
        r"called all_to_all\(counts=\[\[2, 2.*counts=\[\[1, 1",
        alone="noticed",
    ),
    Mistake(
        "other rows",
        lambda comm: comm.gather(FLOATS.reshape(3, 4)),
        lambda comm: comm.gather(FLOATS.reshape(4, 3)),
        r"called gather\(counts=3 each, layout=\(\*, 4\)\).*, .* counts=4 each, layout=\(\*, 3\)",
    ),
    Mistake(
        "another dtype of the same size",
        _reduced(WHOLE),
        _reduced(FLOATS),
        r"called all_reduce\(dtype=int64\).*, .* dtype=float64",
    ),
    Mistake(
        "another dtype without out=",
        lambda comm: comm.broadcast(WHOLE.copy()),
        lambda comm: comm.broadcast(FLOATS.copy()),
        r"called broadcast\(dtype=int64\).*, .* dtype=float64",
        alone="noticed",
    ),
    Mistake(
        "a call that is started and then waited for",
        lambda comm: comm.all_reduce(FLOATS, async_op=True).wait(),
        _reduced(FLOATS),
        r"called all_reduce\(blocking=no\).*, .* blocking=yes",
        alone="noticed",
    ),
    Mistake(
        "another root",
        _from_rank(1),
        _from_rank(0),
        r"called broadcast\(root=1\).*, .* root=0",
        alone="silent at 2",
    ),
    Mistake(
        "another root without out=",
        lambda comm: comm.scatter(FLOATS, 1 % comm.size),
        lambda comm: comm.scatter(FLOATS, 0),
        r"called scatter\(root=1\).*, .* root=0",
        alone="silent at 2",
    ),
    Mistake(
        "another operator",
        _reduced(FLOATS, op="prod"),
        _reduced(FLOATS, op="sum"),
        r"called all_reduce\(op=prod\).*, .* op=sum \(call \d+, from mismatches.py:\d+\)",
    ),
    Mistake(
        "an operator that is not commutative",
        _reduced(FLOATS, op=_added(False), algorithm="recursive_doubling"),
        _reduced(FLOATS, op=_added(True), algorithm="recursive_doubling"),
        r"called all_reduce\(op=mine, user-defined, not commutative\), ",
    ),
    Mistake(
        "another collective",
        lambda comm: comm.scan(FLOATS, algorithm="doubling"),
        _reduced(FLOATS, algorithm="recursive_doubling"),
        r"called scan from mismatches.py:\d+, .* all_reduce from mismatches.py:\d+ \(call \d+\)",
        alone="noticed",
    ),
    Mistake(
        "one call skipped",
        _skipping,
        _not_skipping,
        r"called all_reduce from mismatches.py:\d+, .* barrier from mismatches.py:\d+ \(call \d+\)",
        alone="noticed",
    ),
    Mistake(
        "plans in another order",
        _planned(-1),
        _planned(1),
        r"called all_reduce in call \d+.* in call \d+",
        alone="noticed",
    ),
    Mistake(
        "another shape",
        _reduced(FLOATS.reshape(3, 4)),
        _reduced(FLOATS.reshape(4, 3)),
        r"called all_reduce\(layout=\(3, 4\)\).*, .* layout=\(4, 3\)",
    ),
    Mistake(
        "a transposed array",
        _reduced(FLOATS.reshape(3, 4).T),
        _reduced(FLOATS.reshape(3, 4)),
        r"called all_reduce\(layout=\(4, 3\)\).*, .* layout=\(3, 4\)",
    ),
    Mistake(
        "in place",
        _in_place,
        lambda comm: comm.all_reduce(FLOATS, out=np.empty(12)),
        r"called all_reduce\(in_place=yes\).*, .* in_place=no",
    ),
    Mistake(
        "another algorithm",
        _reduced(FLOATS, algorithm="recursive_doubling"),
        _reduced(FLOATS, algorithm="ring"),
        r"called all_reduce\(algorithm=recursive_doubling\).*, .* algorithm=ring",
        alone="noticed",
    ),
    Mistake(
        "another algorithm in use",
        _using("one_shot"),
        _using("recursive_doubling"),
        r"called all_reduce\(algorithm=one_shot\).*, .* algorithm=recursive_doubling",
        alone="silent at 2",
    ),
    Mistake(
        "no array for the result",
        lambda comm: comm.broadcast(FLOATS.copy()),
        lambda comm: comm.broadcast(FLOATS.copy(), out=np.empty(12)),
        r"called broadcast\(out=not given\).*, .* out=given",
        alone="noticed",
    ),
]


def _counts(comm: Communicator, owner: int) -> list[int]:
    return [12 * (rank == owner) for rank in range(comm.size)]


def _table(comm: Communicator, per_rank: int) -> list[list[int]]:
    return [[per_rank] * comm.size] * comm.size


def _rows(comm: Communicator, per_rank: int) -> np.ndarray:
    return np.arange(float(per_rank * comm.size))


def make(comm: Communicator, mistake: Mistake) -> Any:
    """The last rank is wrong; with one rank there is nobody to differ from."""
    is_wrong = comm.rank == comm.size - 1 and comm.size > 1
    return (mistake.wrong if is_wrong else mistake.right)(comm)


def noticed(comm: Communicator, mistake: Mistake) -> None:
    """Every rank is told the same of who differs in what, and the communicator is as it was."""
    if comm.size == 1:
        make(comm, mistake)
        return
    with pytest.raises(CollectiveMismatch) as error:
        make(comm, mistake)
    said = str(error.value)
    # The minority comes first; of two ranks the last is it.
    others = "rank 0" if comm.size == 2 else "ranks 0"
    assert said.startswith(f"rank {comm.size - 1} called "), said
    assert others in said, said
    error.match(mistake.told)
    still_works(comm)


def still_works(comm: Communicator) -> None:
    """Nothing was sent, so nothing is in the way of what comes next."""
    for _ in range(2):
        assert comm.all_reduce(np.array([1]))[0] == comm.size
        work = comm.all_gather(np.array([comm.rank]), async_op=True)
        assert comm.broadcast(np.array([comm.rank]), comm.size - 1)[0] == comm.size - 1
        assert work.wait().tolist() == list(range(comm.size))
