"""Calls with arguments of every kind, good and bad, and what must become of them.

What a rank makes of its arguments it decides alone, before any message.  So every call is first
rehearsed, for each rank, on a transport on which nothing can be sent.  If all ranks refuse, so they
must in earnest, with the same sentences, nothing sent, and the communicator as good as before; if
none does, the call must give what a serial computation gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import collectives
from bench.workloads.expected import expected
from collectives import Communicator, Operator
from collectives.diagnostics.flight_recorder import FlightRecorder
from collectives.engines.board import Board
from collectives.runtime.session import Session
from tests.scenarios.jobs import COLLECTIVES, REDUCTIONS, ROOTED, WHOLE, same

# Who is who decides what these take: one rank may refuse what another must serve.
ROLES = {*ROOTED, "send", "recv", "subgroup"}


class Value(NamedTuple):
    """An argument, made anew for every rank."""

    text: str
    make: Callable[[int, int], Any]

    def __repr__(self) -> str:
        return self.text


def value(text: str, **known: Any) -> Value:
    """An argument that is written like this; `r` is the rank, `p` the number of ranks."""
    code = compile(text, text, "eval")
    names = {"np": np, "Operator": Operator, "ml_dtypes": ml_dtypes, "small": small, **known}
    return Value(text, lambda r, p: eval(code, {**names, "r": r, "p": p}))


def small(shape: tuple[int, ...], dtype: Any, rank: int) -> np.ndarray:
    """Whole numbers so small that every sum and product of them is exact."""
    return (np.arange(int(np.prod(shape))) * 3 + rank).__mod__(3).reshape(shape).astype(dtype)


def values(*texts: str) -> st.SearchStrategy[Value]:
    return st.sampled_from([value(text) for text in texts])


SHAPES = ["()", "(0,)", "(1,)", "(6,)", "(7,)", "(2, 3)", "(6, 2)", "(3, 0)"]
DTYPES = ["'f8'", "'f4'", "'i4'", "'u1'", "'?'", "'c8'", "'f2'", "ml_dtypes.bfloat16", "'>i4'"]
FORMS = [
    "{}",
    "{}",
    "{}",
    "np.asfortranarray({})",
    "{}[::-1]",
    "{}[::2]",
    "np.broadcast_to({}, {})",
]
NOT_NUMBERS = ["'M8[s]'", "'S3'", "'i4,f8'", "'O'", "'U2'"]
NO_ARRAYS = [
    "None",
    "[1.0, 2.0]",
    "1.5",
    "'x'",
    "b'xy'",
    "np.float64(1)",
    "np.ma.ones(6)",
    "{}",
    "object()",
    "memoryview(bytes(8))",
    "np.ones((2, 3)).view(np.matrix)",
    "np.ndarray",
    "range(6)",
    "np.zeros(6, 'V0')",
]
RANKS = ["0", "1", "p - 1", "np.int64(1)"]
NO_RANKS = ["p", "-1", "1.0", "True", "'0'", "None", "2**70", "np.array([0])", "[]", "np.bool_(1)"]
OPS = ["'sum'", "'max'", "'prod'", "'and'", "'avg'", "Operator.from_function(np.add)"]
NO_OPS = ["'SUM'", "None", "5", "np.add", "[]", "{}", "''", "b'sum'", "Operator", "r"]
ALGORITHMS = ["None", "'linear'", "'ring'", "'binomial'", "'bruck(radix=3)'", "'pairwise'"]
NO_ALGORITHMS = [
    "'none'",
    "5",
    "b'ring'",
    "[]",
    "''",
    "'bruck(radix=-1)'",
    "'ring('",
    "True",
    "'bruck(radix=99999999999)'",
]
COUNTS = ["None", "[2] * p", "(6,) * p", "np.full(p, 2)", "[6] + [0] * (p - 1)"]
TABLES = ["[[6 // p] * p] * p", "np.full((p, p), 2)", "tuple((1,) * p for _ in range(p))"]
NO_COUNTS = [
    "6",
    "[2.0] * p",
    "[-2] + [2] * p",
    "'222'",
    "{}",
    "[[1], [2]]",
    "np.array(2)",
    "[None] * p",
    "(2 for _ in range(p))",
    "[2**70] * p",
    "[True] * p",
    "[[1] * p] * (p + 1)",
    "{2}",
    "[[[1]]]",
    "[[1] * p, 3, [1] * p]",
    "[6, 'a', 3]",
    "np.zeros((p, p, p), int)",
    "np.ones(p)",
]
LIMITS = ["None", "30", "30.0", "float('inf')", "np.float64(30)"]
NO_LIMITS = ["'1'", "-1", "float('nan')", "True", "[]", "1j", "-1e-9", "np.array([1, 2])"]
TAGS = ["0", "7", "np.int32(3)"]
NO_TAGS = ["-1", "2**40", "1.0", "None", "'a'", "True"]
FLAGS = ["False", "False", "True", "1"]


def arrays(dtypes: Sequence[str]) -> st.SearchStrategy[Value]:
    def made(form: str, shape: str, dtype: str) -> Value:
        plain = f"small({shape}, {dtype}, r)"
        form = "{}" if shape == "()" else form
        return value(form.format(plain, shape))

    return st.builds(made, *map(st.sampled_from, (FORMS, SHAPES, dtypes)))


GOOD_X = arrays(DTYPES)
BAD_X = arrays(NOT_NUMBERS) | values(*NO_ARRAYS)
# What else stands for a result than what fits: of these some fit, too.
OUTS = arrays(DTYPES) | values(*NO_ARRAYS)


class Case(NamedTuple):
    """A call.  `out`: how it is given, or an array of its own; None if it is not."""

    name: str
    is_plan: bool
    arguments: dict[str, Value]
    out: Value | str | None

    def keywords(self, rank: int, size: int) -> dict[str, Any]:
        """The arguments of one rank."""
        named = {name: argument.make(rank, size) for name, argument in self.arguments.items()}
        if isinstance(self.out, Value):
            named["out"] = self.out.make(rank, size)
        elif self.out is not None:
            named["out"] = self.fitting(named.get("x"), rank, size)
        return named

    def fitting(self, x: Any, rank: int, size: int) -> Any:
        """An array for the result: new, the input itself, next to it, or read-only."""
        wanted = self.wanted(size) or [None] * size
        like = wanted[-1] if wanted[rank] is None else wanted[rank]
        out = np.empty_like(like) if isinstance(like, np.ndarray) else np.empty(6)
        if self.out == "in place" and isinstance(x, np.ndarray):
            return x
        if self.out == "strided":
            return np.repeat(out, 2, axis=-1)[..., ::2] if out.ndim else out
        out.flags.writeable = self.out != "frozen"
        return out

    def wanted(self, size: int) -> list[Any] | None:
        """Every rank's result; None if there is no such thing."""
        given = [
            {name: argument.make(rank, size) for name, argument in self.arguments.items()}
            for rank in range(size)
        ]
        if self.name == "send_recv":
            return [given[rank - 1]["x"] for rank in range(size)]
        op, counts = given[0].get("op", "sum"), given[0].get("counts")
        if self.name == "all_to_all" and counts is not None and np.ndim(counts) == 1:
            counts = [counts] * size
        try:
            results = expected(
                self.name,
                [arguments["x"] for arguments in given],
                op=np.add if isinstance(op, Operator) else op,
                root=int(given[0].get("root", 0)),
                counts=counts,
            )
            dtype = given[0]["x"].dtype
            return [None if y is None else y.astype(dtype) for y in results]
        except Exception:  # noqa: BLE001 - bad arguments, of which the oracle knows nothing
            return None


@st.composite
def cases(draw: Any) -> Case:
    """A call whose arguments are mostly good, of which any may be bad."""
    name = draw(st.sampled_from(sorted(TAKES)))
    pools = TAKES[name]
    arguments = {
        keyword: draw(good | bad if draw(st.integers(0, 3)) == 0 else good)
        for keyword, (good, bad) in pools.items()
        if keyword in NEEDED or draw(st.booleans())
    }
    has_out = name in RESULTS and draw(st.booleans())
    out = (
        draw(st.sampled_from(["fit", "in place", "frozen", "strided"]) | OUTS) if has_out else None
    )
    is_plan = name not in ("split", "subgroup") and draw(st.integers(0, 4)) == 0
    return Case(name, is_plan, arguments, out)


NEEDED = {"x", "peer", "dest", "source", "color", "ranks"}
RESULTS = [*COLLECTIVES, "send_recv"]
Pool = tuple[st.SearchStrategy[Value], st.SearchStrategy[Value]]
_PLAIN: dict[str, Pool] = {
    "timeout": (values(*LIMITS), values(*NO_LIMITS)),
    "async_op": (values(*FLAGS), values("np.array([1, 2])")),
}
_X: dict[str, Pool] = {"x": (GOOD_X, BAD_X)}
_PEERS: dict[str, Pool] = {
    "peer": (values(*RANKS), values(*NO_RANKS)),
    "tag": (values(*TAGS), values(*NO_TAGS)),
}
_COLLECTIVE: dict[str, Pool] = {"algorithm": (values(*ALGORITHMS), values(*NO_ALGORITHMS))}


def _pools(collective: str) -> dict[str, Pool]:
    """What a collective takes, but for `out`."""
    pools = _X | _COLLECTIVE | _PLAIN
    if collective in REDUCTIONS:
        pools["op"] = values(*OPS), values(*NO_OPS)
    if collective in ("all_reduce", "reduce_scatter"):
        pools["shards"] = values("None"), values("0", "-1", "2.0", "'8'", "[8]", "True", "2**70")
    if collective in ROOTED:
        pools["root"] = values(*RANKS), values(*NO_RANKS)
    if collective not in WHOLE:
        tables = TABLES if collective == "all_to_all" else []
        pools["counts"] = values(*COUNTS, *tables), values(*NO_COUNTS)
    return pools


TAKES = {collective: _pools(collective) for collective in COLLECTIVES}
TAKES["barrier"] = _COLLECTIVE | _PLAIN
TAKES["send"] = TAKES["recv"] = _X | _PEERS | _PLAIN
TAKES["send_recv"] = {
    **(_X | _PLAIN),
    "dest": (values("(r + 1) % p"), values(*NO_RANKS)),
    "source": (values("(r - 1) % p"), values(*NO_RANKS)),
    "tag": _PEERS["tag"],
}
TAKES["split"] = {
    "color": (values("None", "0", "r", "r % 2", "2**62"), values(*NO_RANKS[1:], "2**63", "-2")),
    "key": (values("0", "-r", "5"), values(*NO_RANKS[2:])),
}
TAKES["subgroup"] = {
    "ranks": (
        values("range(p)", "list(range(p))[::-1]", "np.arange(p)", "[r]"),
        values("None", "5", "'01'", "[0, 0]", "[]", "[p]", "[0.0, 1]", "[[0], [1]]", "[None]"),
    )
}


# The rehearsal


class Reached(Exception):  # noqa: N818 - it is no error
    """A message would be sent now."""


class Nowhere:
    """A transport from which nothing comes and on which nothing can be sent."""

    num_tags = 1 << 30

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.in_flight: list[Any] = []
        self.failed: list[Any] = []
        self.flight = FlightRecorder(rank, size)
        self.identity = tuple(range(size)), 1
        self.log = self.flight.log(*self.identity)
        self.board = Board(None, range(size), rank, self.identity)

    patience = 0.0
    why_interpreted = "nothing is run"

    def execution(self, *_: Any) -> Any:
        raise Reached

    subgroup = split = execution


def refusal(case: Case, rank: int, size: int) -> Exception | None:
    """What a rank says against its arguments, if anything; any other error is its own."""
    session = Session(Nowhere(rank, size))  # type: ignore[arg-type]
    try:
        perform(Communicator(session), case)
    except (TypeError, ValueError) as error:
        assert session.numbering.num_calls == session.messages.num_messages == 0, (
            "a refused call has counted"
        )
        return error
    except Reached:
        return None
    return None


def perform(comm: Communicator, case: Case) -> Any:
    """Make the call, and see it through."""
    caller = comm.plan if case.is_plan else comm
    got = getattr(caller, case.name)(**case.keywords(comm.rank, comm.size))
    if isinstance(got, collectives.Plan):
        result = got.run()
        got.free()
        return result
    return got.wait() if isinstance(got, collectives.Work) else got


# In earnest


def refused_by_all(comm: Communicator, cases: Sequence[Case], refusals: Sequence[Any]) -> None:
    """Every rank says what it said before; nothing is sent, and the next call is served."""
    with comm.record() as ledger, pytest.raises((TypeError, ValueError)) as error:
        perform(comm, cases[comm.rank])
    mine = refusals[comm.rank]
    assert (type(error.value), without_addresses(error.value)) == (
        type(mine),
        without_addresses(mine),
    )
    assert ledger.rows() == []
    assert comm.all_reduce(np.array([1]))[0] == comm.size


def without_addresses(error: Exception) -> str:
    return re.sub("0x[0-9a-f]+", "", str(error))


def served(comm: Communicator, case: Case) -> None:
    """The call gives what it should."""
    got, wanted = perform(comm, case), case.wanted(comm.size)
    if isinstance(got, Communicator):
        assert got.all_reduce(np.array([1]))[0] == got.size
        got.free()
    elif wanted is not None:
        same(got, wanted[comm.rank], case)
    assert comm.all_reduce(np.array([1]))[0] == comm.size


def check(case: Case, size: int, run: Callable[[Callable[[Communicator], None]], object]) -> None:
    """One call, the same on every rank.  `run` runs a function on all ranks."""
    refusals = [refusal(case, rank, size) for rank in range(size)]
    if all(refusals):
        run(lambda comm: refused_by_all(comm, [case] * size, refusals))
    elif any(refusals):
        # Ranks' counts of rows, and whether an array of their results' size is contiguous, differ.
        may_differ = case.name in ROLES or "counts" in case.arguments or case.out == "strided"
        assert may_differ, f"only some ranks refuse: {refusals}"
    elif case.name not in ("send", "recv") and not is_known_late(case, size):
        run(lambda comm: served(comm, case))


def is_known_late(case: Case, size: int) -> bool:
    """Whether the ranks must exchange their counts to see that `out` has not so many rows."""
    if case.name != "all_to_all" or case.out is None:
        return False
    wanted = case.wanted(size)
    given = [case.keywords(rank, size) for rank in range(size)]
    return wanted is not None and any(
        np.ndim(named.get("counts")) == 1 and named["out"].shape != want.shape
        for named, want in zip(given, wanted, strict=True)
    )


def bad_cases(size: int) -> st.SearchStrategy[tuple[Case, ...]]:
    """Another call for every rank, each of which that rank refuses."""
    return st.tuples(
        *(cases().filter(partial(refusal, rank=rank, size=size)) for rank in range(size))
    )


def check_each(
    cases: Sequence[Case], run: Callable[[Callable[[Communicator], None]], object]
) -> None:
    """Another call on every rank, each of them bad."""
    refusals = [refusal(case, rank, len(cases)) for rank, case in enumerate(cases)]
    assert all(refusals)
    run(lambda comm: refused_by_all(comm, cases, refusals))
