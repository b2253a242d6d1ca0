"""What every rank does in a test, for any communicator: threads and MPI run the same scenarios.

A `Job` is drawn on every rank alike; each rank knows all inputs, so that it can work out alone
what it must get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import ml_dtypes
import numpy as np

import collectives
from bench.workloads.expected import expected
from collectives import Communicator
from collectives.arrays.operators import operators
from collectives.schedule.contracts import SPECS
from collectives.schedule.layout import even_counts
from tests.covering import covering

WHOLE = [name for name, spec in SPECS.items() if spec.has_pieces]  # these divide nothing
REDUCTIONS = [name for name, spec in SPECS.items() if spec.is_reduction]
MOVERS = [name for name, spec in SPECS.items() if not spec.is_reduction and name != "barrier"]
ROOTED = [name for name, spec in SPECS.items() if spec.is_rooted]
COLLECTIVES = [name for name in SPECS if name != "barrier"]
ALGORITHMS = [(c, a) for c in COLLECTIVES for a in collectives.algorithms.names(c)]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64", "longdouble", "bfloat16"]
COMPLEX = ["complex64", "complex128", "clongdouble"]
DTYPES = ["bool", *INTEGERS, *FLOATS, *COMPLEX]
OPS = {
    "sum": [*INTEGERS, *FLOATS, *COMPLEX],
    "prod": [*INTEGERS, *FLOATS, *COMPLEX],
    "min": ["bool", *INTEGERS, *FLOATS],
    "max": ["bool", *INTEGERS, *FLOATS],
    "avg": [*FLOATS, *COMPLEX],
    "and": ["bool", *INTEGERS],
    "or": ["bool", *INTEGERS],
    "xor": ["bool", *INTEGERS],
}
CASES = [(c, op) for c in REDUCTIONS for op in operators(c)]


def dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@dataclass(frozen=True)
class Job:
    """One collective call on `size` ranks.

    `algorithm`: with options, if any.  `rows`: the vector's, or each rank's (a tuple).
    """

    collective: str
    algorithm: str | None
    size: int
    rows: Any
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    tail: tuple[int, ...] = ()
    is_in_place: bool = False
    is_async: bool = False

    def inputs(self) -> list[np.ndarray]:
        """Small whole numbers: every order of combining them is exact, in every dtype."""
        return [self._input(rank) for rank in range(self.size)]

    def _input(self, rank: int) -> np.ndarray:
        shape = (self.num_rows(rank), *self.tail)
        mixed = (np.arange(np.prod(shape, dtype=int)) * 7 + rank * 3) % 5
        if self.op == "prod":
            mixed = 1 + (mixed == 0) * (rank < 4)
        return mixed.reshape(shape).astype(dtype(self.dtype))

    def num_rows(self, rank: int) -> int:
        if self.collective == "all_to_all" and self.counts() is not None:
            return sum(self.counts()[rank])
        if self.collective in ("gather", "all_gather"):
            return self.rows[rank]
        return self.rows if isinstance(self.rows, int) else sum(self.rows)

    def counts(self) -> Any:
        """`counts=` of the call: given where the rows are a tuple."""
        if isinstance(self.rows, int):
            return None
        if self.collective == "all_to_all":
            p = self.size
            return [[self.rows[(s + 2 * d) % p] for d in range(p)] for s in range(p)]
        return list(self.rows)

    def has_result(self, rank: int) -> bool:
        """Whether this rank gets one; what it passes as `out` matters only then."""
        if self.collective in ("gather", "reduce"):
            return rank == self.root
        return rank > 0 or self.collective != "exscan"


def random_rows(collective: str, size: int, num_rows: int, is_even: bool) -> Any:
    """Rows for a job: an int where the library divides, a tuple where ranks have their own."""
    if collective in WHOLE:
        return num_rows
    parts = even_counts(num_rows, size)
    uneven = tuple((17 * r * r + num_rows) % (num_rows + 1) for r in range(size))
    if collective in ("gather", "all_gather"):
        return (num_rows,) * size if is_even else uneven
    return num_rows if is_even else (parts if num_rows % 2 else uneven)


def perform(comm: Communicator, job: Job) -> Any:
    """Make the call, check that it is right and that the input is as it was, return the result."""
    inputs, want = given_and_due(job)
    got = call(comm, job, inputs[comm.rank].copy())
    same(got, want[comm.rank], job)
    return got


@lru_cache(maxsize=4)
def given_and_due(job: Job) -> tuple[list[np.ndarray], list[Any]]:
    """What each rank brings and must get; not to be changed, as ranks that are threads share it."""
    given = job.inputs()
    return given, expected(job.collective, given, op=job.op, root=job.root, counts=job.counts())


def unchanged(x: Any) -> Any:
    """Host arrays are where they shall be."""
    return x


def call(
    comm: Communicator, job: Job, x: Any, to_host: Callable[[Any], np.ndarray] = unchanged
) -> Any:
    """The public call of a job; in place where the job says so and the collective can.

    What it reads is the same when the call is complete, unless it is where the result goes.
    """
    keywords: dict[str, Any] = {**options_of(job), "async_op": job.is_async}
    if job.is_in_place:
        x, keywords["out"] = in_place(comm, job, x)
    if job.collective == "scatter" and comm.rank != job.root:
        x = None
    is_filled = job.collective == "broadcast" and comm.rank != job.root
    if keywords.get("out") is not None:
        is_filled = job.has_result(comm.rank)
    read = [keywords.get("counts"), None if x is None or is_filled else to_host(x)]
    before = fingerprint(*read)
    got = getattr(comm, job.collective)(x, **keywords)
    if job.is_async:
        got = got.wait()
    assert fingerprint(*read) == before, f"{job} has changed what it reads"
    return got


def options_of(job: Job) -> dict[str, Any]:
    """The keywords of the call, without arrays."""
    options: dict[str, Any] = {"algorithm": job.algorithm}
    if job.collective in ROOTED:
        options["root"] = job.root
    if job.collective in REDUCTIONS:
        options["op"] = job.op
    if job.counts() is not None and job.collective not in WHOLE:
        options["counts"] = job.counts()
    return options


def fingerprint(counts: object, x: np.ndarray | None) -> tuple[str, str]:
    """What a call reads, in short."""
    return repr(counts), "" if x is None else blake2b(x.tobytes()).hexdigest()


def in_place(comm: Communicator, job: Job, x: Any) -> tuple[Any, Any]:
    """(x, out) that share memory where the collective can: the part is a slice of the whole."""
    if job.collective in WHOLE and job.collective in REDUCTIONS:
        return x, x
    if job.collective == "all_to_all":
        table = job.counts() or [even_counts(job.rows, comm.size)] * comm.size
        columns = list(zip(*table, strict=True))
        fits = [sum(table[rank]) == sum(columns[rank]) for rank in range(comm.size)]
        is_fine = all(fits) if comm.check else fits[comm.rank]  # checked: on all ranks or none
        return x, x if is_fine else None
    if job.collective == "reduce_scatter":
        return x, rows_of(comm, x, job.counts() or even_counts(job.rows, comm.size))
    if job.collective in ("gather", "all_gather") and isinstance(x, np.ndarray):
        whole = np.zeros((sum(job.rows), *job.tail), x.dtype)
        mine = rows_of(comm, whole, job.rows)
        mine[...] = x
        return mine, whole
    return x, None


def rows_of(comm: Communicator, whole: Any, counts: Any) -> Any:
    """This rank's rows."""
    start = sum(counts[: comm.rank])
    return whole[start : start + counts[comm.rank]]


def same(got: Any, want: Any, what: object) -> None:
    """Equal in kind, dtype, shape and every bit of value."""
    if want is None:
        assert got is None, f"{what}: got {got!r}, wanted None"
        return
    assert isinstance(got, np.ndarray), f"{what}: got {got!r}"
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{what}: got {got.dtype}{got.shape}, wanted {want.dtype}{want.shape}"
    )
    assert np.array_equal(got, want), f"{what}: got {got}, wanted {want}"


def all_jobs(size: int) -> list[Job]:
    """Every algorithm on `size` ranks, as it stands and with other options."""
    return [job for algorithm in ALGORITHMS for job in jobs_of(*algorithm, size)]


def some_jobs(
    collective: str, sizes: Iterable[int], algorithm: Callable[[Job], Iterable[str]]
) -> list[Job]:
    """Jobs of a collective on these numbers of ranks, in which all pairs of properties occur.

    The properties are the size, the rows, the root, whether it is in place, and what `algorithm`
    makes of its algorithm.
    """

    def properties(job: Job) -> tuple[Any, ...]:
        rows, is_last = (job.tail, bool(np.any(job.rows))), job.root == job.size - 1
        return job.size, rows, is_last, job.is_in_place, *algorithm(job)

    every = (job for size in sizes for job in all_jobs(size) if job.collective == collective)
    jobs = {properties(job): job for job in every}
    return [jobs[row] for row in covering([*jobs])]


def name_and_options(job: Job) -> Sequence[str]:
    """The algorithm of a job and its options apart, as `some_jobs` takes them."""
    return (job.algorithm or "").partition("(")[::2]


def jobs_of(collective: str, algorithm: str, size: int) -> list[Job]:
    """Even, uneven and two-dimensional, and empty rows; with other options uneven ones only.

    Those of even rows that are not in place are asynchronous calls.

    None where the algorithm does not serve `size` ranks.
    """
    first, last, both = 0, size - 1, (False, True)
    uneven = (9, (2, 3), False, [last], both)
    every = [uneven, (13, (), True, [first, last], both), (0, (), True, [last], (False,))]
    jobs = []
    for text in variants(collective, algorithm, size):
        for num_rows, tail, is_even, roots, places in every if text == algorithm else [uneven]:
            rows = random_rows(collective, size, num_rows, is_even)
            jobs += [
                Job(
                    collective,
                    text,
                    size,
                    rows,
                    tail=tail,
                    root=root,
                    is_in_place=is_in_place,
                    is_async=is_even and not is_in_place,
                )
                for root in (sorted(set(roots)) if collective in ROOTED else [first])
                for is_in_place in places
            ]
    return jobs


OTHER_VALUES = {
    "segments": 5,
    "radix": 3,
    "outstanding": 3,
    "chains": 3,
    "per_host": 3,
    "y": 2,
    "aggregation": 1,
}


def variants(collective: str, algorithm: str, size: int) -> list[str]:
    """The algorithm as it stands, and with another value of every option, if it serves `size`."""
    info = collectives.algorithms.info(collective, algorithm)
    options = {name: value for name, value in info.options.items() if name != "shards"}
    other = {name: other_value(name, value, size) for name, value in options.items()}
    served = [options for options in ({}, other) if info.serves(size, **options)]
    return list(dict.fromkeys(spelled(algorithm, options) for options in served))


def other_value(option: str, default: int, size: int) -> int:
    """A value that is not the default, of a dimension of a torus one that divides `size`."""
    if option == "x":
        return max((d for d in range(2, size) if size % d == 0 and d != default), default=1)
    value = OTHER_VALUES[option]
    return value if value != default else value + 1


def spelled(algorithm: str, options: Mapping[str, int]) -> str:
    """An algorithm with its options, as `algorithm=` takes it."""
    listed = ", ".join(f"{name}={value}" for name, value in options.items())
    return f"{algorithm}({listed})" if listed else algorithm
