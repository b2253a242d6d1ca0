"""mpi4py's own test suite, run on our communicators.  One rank of a job:

    mpirun -n 3 python tests/mpi4py_compat/drop_in_program.py path/to/mpi4py/test \
        [--modules test_cco_buf ...]

Every test gets one of our communicators, made from its own, below which stands a class in which
every collective of MPI raises; and the flight recorder must show calls of ours that send, and with
`--record` the ledger their messages.  `--missing Bcast` takes a collective of ours away, and
`--broken Bcast` makes it do nothing: both must be noticed.  `--times` runs the tests on mpi4py's
own communicators as well, and says how long both took.

Most tests repeat their calls for every kind of array with every type of elements.  Without `--all`
or `--times`, those of non-blocking and of persistent calls, and those on duplicates of
communicators, take one kind of array for each type: what arrays are given is found out by the same
code for all calls, and the other tests take them all.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import unittest
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from mpi4py import MPI

import collectives
from tests.inside import transport_of

MODULES = ["buf", "vec", "obj", "nb_buf", "nb_vec", "pr_buf", "pr_vec"]
WORDS = "passed", "failed", "skipped"
STEMS = """
    barrier bcast gather gatherv scatter scatterv allgather allgatherv alltoall alltoallv alltoallw
    reduce allreduce reduce_scatter_block reduce_scatter scan exscan
"""
POINT_TO_POINT = ["Send", "Recv", "Bsend", "Ssend", "Rsend", "Psend", "Precv"]


def collective_names() -> list[str]:
    """Every collective of mpi4py's intracommunicators.  A new one, yet unknown, is among them."""
    known = {
        form
        for s in STEMS.split()
        for form in (s, s.capitalize(), f"I{s}", f"{s.capitalize()}_init")
    }
    theirs = [name for name in dir(MPI.Intracomm) if not name.startswith("_")]
    persistent = [name for name in theirs if name.endswith("_init")]
    unknown = {name.removesuffix("_init") for name in persistent} - set(POINT_TO_POINT)
    return [name for name in theirs if name in known or name.removesuffix("_init") in unknown]


def raising(name: str) -> Any:
    def method(*_: object, **__: object) -> None:
        raise AssertionError(f"{name} fell back to MPI")

    return method


Raising = type("Raising", (MPI.Intracomm,), {name: raising(name) for name in collective_names()})


class Tested(collectives.Intracomm, Raising):  # type: ignore[misc, valid-type]
    """Ours, with nothing of MPI's below it."""


def one_kind_for_each_type(loop: Callable[..., Any], kinds: list[Any]) -> Callable[..., Any]:
    """mpi4py's `arrayimpl.loop` with one kind of array for each type, and each kind for some."""
    serving = defaultdict(list)
    for kind in kinds:
        for code in kind.TypeMap:
            serving[code].append(kind)
    chosen = {(able[n % len(able)], code) for n, (code, able) in enumerate(serving.items())}
    assert {kind for kind, _ in chosen} == set(kinds)

    def part(*values: Any) -> Iterator[tuple[Any, ...]]:
        return (parameters for parameters in loop(*values) if parameters[:2] in chosen)

    return part


def repeats_other_tests(case: type[unittest.TestCase]) -> bool:
    """Whether the blocking calls on the communicator itself are tested with the same arrays."""
    return "_nb_" in case.__module__ or "_pr_" in case.__module__ or case.__name__.endswith("Dup")


def on_ours(
    case: type[unittest.TestCase], agreement: MPI.Intracomm, is_recorded: bool, takes_all: bool
) -> type[unittest.TestCase]:
    """The same test case, whose communicator is one of ours made from it."""

    class OnOurs(case):  # type: ignore[misc, valid-type]
        def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
            arrays: Any = sys.modules.get("arrayimpl")  # what is passed to `bcast` is no array
            with pytest.MonkeyPatch.context() as patch:
                if arrays and repeats_other_tests(case) and not takes_all:
                    few = one_kind_for_each_type(arrays.loop, arrays.ArrayBackends)
                    patch.setattr(arrays, "loop", few)
                return super().run(result)

        def setUp(self) -> None:
            super().setUp()
            self.COMM = Tested(self.COMM)
            self.recording = self.COMM.record() if is_recorded else nullcontext()
            self.ledger = self.recording.__enter__()

        def tearDown(self) -> None:
            ours = self.COMM
            is_alone, num_sent = ours.size == 1, num_sending_calls(ours)
            if self.ledger is not None:
                num_sent = min(num_sent, len(self.ledger.rows()))
            self.recording.__exit__(None, None, None)
            super().tearDown()
            ours.free()
            # Some calls let the last rank send nothing.
            assert is_alone or agreement.allreduce(num_sent), "no message of ours is shown"

    OnOurs.__name__, OnOurs.__qualname__ = case.__name__, case.__qualname__
    OnOurs.__module__ = case.__module__
    return OnOurs


def num_sending_calls(ours: collectives.Intracomm) -> int:
    """Of the last calls on this communicator, which the flight recorder has, those that send."""
    log = transport_of(ours.communicator).log
    calls = [call for _, call in log.calls(time.perf_counter_ns())]
    # A barrier's messages have no bytes.
    return sum(call["bytes"] > 0 or call["collective"] == "barrier" for call in calls)


class Agreeing(unittest.TestResult):
    """Outcomes by name of the test.  After every test the ranks agree on it.

    The first failure ends the run, unless it is among those that `may_fail`.
    """

    def __init__(
        self, agreement: MPI.Intracomm, is_verbose: bool, may_fail: Collection[str]
    ) -> None:
        super().__init__()
        self.agreement, self.is_verbose, self.may_fail = agreement, is_verbose, may_fail
        self.outcomes: dict[str, str] = {}

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.outcomes.setdefault(test.id(), "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.outcomes[test.id()] = f"skipped: {reason}"

    def addError(
        self,
        test: unittest.TestCase,
        err: tuple[type[BaseException], BaseException, TracebackType] | Any,
    ) -> None:
        self.outcomes[test.id()] = "failed"
        if test.id() in self.may_fail:
            return
        trace = self._exc_info_to_string(err, test)  # type: ignore[attr-defined]
        print(f"rank {self.agreement.rank}: {test.id()}\n{trace}", file=sys.stderr, flush=True)

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.started = time.perf_counter()

    def stopTest(self, test: unittest.TestCase) -> None:
        outcomes = self.agreement.allgather(self.outcomes.get(test.id()))
        if len(set(outcomes)) > 1 or "failed" in outcomes:
            self.outcomes[test.id()] = "failed"
            if test.id() not in self.may_fail:
                self.stop()
        if self.is_verbose and self.agreement.rank == 0:
            seconds = time.perf_counter() - self.started
            print(f"{seconds:6.1f} s  {test.id()}", flush=True)
        super().stopTest(test)


def cases(names: list[str]) -> list[type[unittest.TestCase]]:
    """The test cases of these modules, in the order of their names."""
    modules = [importlib.import_module(name) for name in names]
    return [
        case
        for module in modules
        for _, case in sorted(vars(module).items())
        if isinstance(case, type) and issubclass(case, unittest.TestCase)
    ]


def outcomes(
    cases: list[type[unittest.TestCase]],
    agreement: MPI.Intracomm,
    is_verbose: bool = False,
    only: Collection[str] = (),
    may_fail: Collection[str] = (),
) -> dict[str, str]:
    """Run them all, or `only` some, up to the first that fails on any rank (see `Agreeing`)."""
    result = Agreeing(agreement, is_verbose, may_fail)
    load = unittest.defaultTestLoader.loadTestsFromTestCase
    tests = [test for case in cases for test in load(case) if not only or test.id() in only]
    unittest.TestSuite(tests).run(result)
    return result.outcomes


def skips(outcomes: dict[str, str]) -> dict[str, str]:
    return {name: outcome for name, outcome in outcomes.items() if outcome.startswith("skipped")}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--modules", nargs="+", default=[f"test_cco_{name}" for name in MODULES])
    parser.add_argument("--missing", choices=collective_names())
    parser.add_argument("--broken", choices=collective_names())
    parser.add_argument("--record", action="store_true", help="record every test in a ledger")
    parser.add_argument("--all", action="store_true", help="every test takes all arrays")
    parser.add_argument("--times", action="store_true", help="compare with mpi4py's own")
    parser.add_argument("--verbose", action="store_true", help="say how long each test took")
    chosen = parser.parse_args()
    if chosen.missing:
        setattr(Tested, chosen.missing, getattr(Raising, chosen.missing))
    if chosen.broken:
        setattr(Tested, chosen.broken, lambda *_, **__: None)
    sys.path.insert(0, str(chosen.directory))
    agreement = MPI.COMM_WORLD.Dup()
    with pytest.MonkeyPatch.context() as patch:  # as its main does; we need numba ourselves
        for name in ("cupy", "numba"):
            patch.setitem(sys.modules, name, None)
        tests = [case for case in cases(chosen.modules) if hasattr(case, "COMM")]
    takes_all = chosen.all or chosen.times
    ours_of = [on_ours(case, agreement, chosen.record, takes_all) for case in tests]
    started = time.perf_counter()
    ours = outcomes(ours_of, agreement, chosen.verbose)
    on_ours_for = time.perf_counter() - started
    # What mpi4py's own communicators skip on this MPI, ours may skip as well, and nothing else.
    started = time.perf_counter()
    plain = outcomes(tests, agreement) if skips(ours) or chosen.times else {}
    on_plain_for = time.perf_counter() - started
    ok = is_good(ours, plain)
    if chosen.times and agreement.rank == 0:
        ratio = on_ours_for / on_plain_for
        print(f"{on_ours_for:.2f} s, mpi4py's own {on_plain_for:.2f} s: {ratio:.2f} times as long")
    if agreement.rank == 0:
        counted = [sum(word in outcome for outcome in ours.values()) for word in WORDS]
        print(", ".join(f"{n} {word}" for n, word in zip(counted, WORDS, strict=True)))
        for name, reason in skips(ours).items():
            print(f"  {name}: {reason}; by mpi4py itself: {plain.get(name)}")
        print("mpi4py's suite passes" if ok else "mpi4py's suite FAILS", flush=True)
    agreement.Barrier()
    return 0 if ok else 1


def is_good(ours: dict[str, str], plain: dict[str, str]) -> bool:
    """Whether all passed, but for what mpi4py's own communicators skip."""
    return "passed" in ours.values() and all(
        outcome == "passed" or (name in skips(ours) and plain.get(name) == outcome)
        for name, outcome in ours.items()
    )


if __name__ == "__main__":
    sys.exit(main())
