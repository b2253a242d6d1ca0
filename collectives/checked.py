"""Checked mode: the ranks tell each other what they are about to call, and stop where they differ.

A guard stands around a plan's own messages.  Before them every rank gets every rank's fingerprint,
so that all see the same and say the same; where something differs nothing of the call is sent.
In the mode "finite" values are looked at as well: those that are brought before anything is sent,
and afterwards those that a reduction has made.

Fingerprints have a schedule of their own, the same whatever the call, and numbers of their own: on
every rank the n-th call that is started meets the n-th of the others, however they are made.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

from collectives import algorithms, fingerprint
from collectives.arrays import HOST, Array, Backend, num_elements
from collectives.errors import CollectiveError, CollectiveMismatch, NotFinite
from collectives.fingerprint import AMISS_AT, NUM_BYTES, NUM_COMPARED, Fingerprint
from collectives.lanes import compile_lanes
from collectives.ledger import Recorder, Sent, finish
from collectives.plan import Binder, Buffers, Stage
from collectives.program import Aliasing, Counts
from collectives.reduction import OPERATORS, Operator, has_infinities
from collectives.select import Choice
from collectives.spec import SPECS
from collectives.transport import Action, Exchange, Transport

Mode = Literal["calls", "finite"]
LABEL, ALGORITHM = "check", "bruck"  # in the ledger; it serves any p in log p rounds

_PACKAGE = os.path.dirname(__file__) + os.sep
_LIKE_ANY_OTHER = ("exscan", "barrier")  # in place or not: it concerns not every rank


# What a call looks like


def describe(
    collective: str,
    source: Array | None,
    target: Array | None,
    counts: Counts | None,
    root: int,
    op: Operator | None = None,
    chosen: Choice | None = None,
    aliasing: Aliasing | None = None,
) -> Fingerprint:
    """What all ranks must agree on, as far as this one knows it."""
    spec, like = SPECS[collective], source if target is None or source is not None else target
    shape = None if like is None else tuple(like.shape)
    layout = "" if shape is None else str(shape)
    if shape is not None and not spec.has_pieces:  # these join or divide rows
        layout = f"({', '.join(['*', *map(str, shape[1:])])})"
    return Fingerprint(
        collective,
        dtype="" if like is None else str(like.dtype),
        counts="" if spec.has_pieces or shape is None else _rows(counts, num_elements(shape[1:])),
        op="" if op is None else _operator(op),
        root=str(root) if spec.is_rooted else "",
        algorithm="" if chosen is None else _algorithm(chosen),
        in_place="" if spec.is_rooted else _in_place(collective, source, target, aliasing),
        layout=layout,
    )


def _rows(counts: Counts | None, per_row: int) -> str:
    """Numbers of elements as the rows that the caller counts in."""
    if counts is None or isinstance(counts, int) or not per_row:
        return ""
    if not isinstance(counts[0], int):
        return str([[count // per_row for count in row] for row in counts])
    rows = [count // per_row for count in counts]
    return f"{rows[0]} each" if len(set(rows)) == 1 else str(rows)


def _operator(op: Operator) -> str:
    if OPERATORS.get(op.name) is op:
        return op.name
    return f"{op.name} of the caller's, {'' if op.is_commutative else 'not '}commutative"


def _algorithm(chosen: Choice) -> str:
    options = ", ".join(f"{name}={value}" for name, value in chosen.options.items())
    return f"{chosen.algorithm.name}({options})" if options else chosen.algorithm.name


def announced(collective: str, like: Array | None, counts: Sequence[int] | None) -> dict[str, str]:
    """What the ranks tell each other where a header goes first.

    `like` and `counts`: what this rank knows of the root's array and its rows, if anything.
    """
    known = describe(collective, like, None, None, 0)
    return {
        "collective": collective,
        "dtype": known.dtype,
        "counts": "" if counts is None else _rows(tuple(counts), 1),
        "algorithm": "",
        "layout": known.layout,
        "out": "not given",
    }


def _in_place(
    collective: str, source: Array | None, target: Array | None, aliasing: Aliasing | None
) -> str:
    """An array without elements is in no place."""
    if collective in _LIKE_ANY_OTHER or aliasing is None or source is None or target is None:
        return ""
    if not source.size or not target.size:
        return ""
    return "no" if aliasing == "none" else "yes"


# What is exchanged


class Numbers(Protocol):
    """Who numbers the calls of the communicator."""

    @property
    def num_calls(self) -> int:
        """How many there have been."""

    def catch_up(self, num_calls: int) -> None:
        """There have been so many on another rank."""

    def checks_tag(self) -> int:
        """The tag of the next exchange of fingerprints."""


class Checker:
    """What the guards of one communicator share.

    `compares_place`: whether ranks must agree on being in place; not if that is the choice of a
    layer above, which brings some ranks' data together elsewhere.
    """

    def __init__(self, transport: Transport, mode: Mode, numbers: Numbers) -> None:
        self.transport, self.mode, self.numbers = transport, mode, numbers
        self.compares_place = True
        rank, size = transport.rank, transport.size
        chosen = algorithms.info("all_gather", ALGORITHM)
        counts = (NUM_BYTES,) * size
        self.program = compile_lanes(chosen, rank, size, 0, counts, (), "none", 1)

    def sent(self) -> Sent:
        """What each exchange sends."""
        return tuple(self.program.sent())


class Guard:
    """The exchanges around the messages of one plan, for all its runs.

    `source` and `result`: what is looked at in the mode "finite", `result` where a reduction makes
    it.  `objection`: what all ranks raise; `has_passed`: whether the call's own messages were begun
    by then.
    """

    def __init__(
        self,
        checker: Checker,
        what: Fingerprint,
        backend: Backend,
        source: Array | None,
        result: Array | None,
        recorder: Recorder,
        counter: list[int] | None,
    ) -> None:
        self._checker, self._backend, self._recorder = checker, backend, recorder
        self._is_strict = checker.mode == "finite"
        self._source, self._result = _watched(source), _watched(result)
        self._makes_result = bool(what.op)
        self._has_place = bool(what.in_place)
        self._counter = counter  # what numbers the runs, if they are not numbered from 1
        self._num_runs = 0
        self._entered: list[list[Any]] = []
        size = checker.transport.size
        self._mine = np.zeros(NUM_BYTES, np.uint8)
        self._table = np.empty((size, NUM_BYTES), np.uint8)
        self._message = memoryview(self._mine)  # type: ignore[arg-type]
        self._message[:] = fingerprint.encode(what._replace(mode=checker.mode))
        self.num_bytes = self._mine.nbytes + self._table.nbytes
        self._before: list[Exchange] = []
        self._after: list[Exchange] = []
        self.objection: CollectiveError | None = None
        self.has_passed = False

    def around(
        self, opening: list[Action], stages: list[Stage]
    ) -> tuple[list[Action], list[Stage]]:
        """What a plan does, with the exchanges before it, and after it if results are looked at."""
        first, before = self._exchange()
        self._before = [stage.exchange for stage in before]
        _end(first, before).extend([self._judge, *opening])
        stages = [*before, *stages]
        if self._is_strict and self._makes_result:
            again, after = self._exchange()
            self._after = [stage.exchange for stage in after]
            _end(again, after).append(self._judge_result)
            _end(first, stages).extend([self._tell_result, *again])
            stages += after
        return [self._tell, *first], stages

    def _exchange(self) -> tuple[list[Action], list[Stage]]:
        """Every rank's message to every rank, bound."""
        program = self._checker.program
        scratch = HOST.empty((program.num_scratch * program.num_slots,), self._mine.dtype)
        buffers = Buffers(HOST, self._mine, self._table.reshape(-1), scratch)
        transport = self._checker.transport
        opening, stages = Binder(program, buffers, transport, None, 0, is_kept=False).bound()
        among = f"{program.num_rounds} of its check"
        return opening, [stage._replace(among=among) for stage in stages]

    def in_place(self, is_in_place: bool) -> None:
        """What the next run is, where the plan itself cannot know."""
        if self._has_place:
            fingerprint.put(self._message, "in_place", "yes" if is_in_place else "no")

    def _tell(self) -> None:
        """Our fingerprint, as it is in this run."""
        self._num_runs += 1
        self.has_passed = False
        number = self._recorder.number(self._run_number()).removesuffix("a")  # or goes ahead of it
        fingerprint.put(self._message, "call", number)
        fingerprint.put(self._message, "place", _place())
        fingerprint.put(self._message, "num_calls", str(self._checker.numbers.num_calls))
        self._put_amiss(self._source)
        self._number(self._before)
        if self._is_strict:  # also where nothing comes after: ranks that differ stay in step
            self._number(self._after)
        self._enter()

    def _number(self, exchanges: Sequence[Exchange]) -> None:
        tag = self._checker.numbers.checks_tag()
        for exchange in exchanges:
            exchange.retag(tag)

    def _judge(self) -> None:
        """All ranks see the same fingerprints; they go on, or raise the same."""
        finish(self._entered, time.perf_counter())
        if not self._are_alike():
            self._object(CollectiveMismatch, fingerprint.difference(self._ranks()))
            self._object(NotFinite, fingerprint.not_finite(self._ranks(), "brings", "to"))
        self.has_passed = True

    def _tell_result(self) -> None:
        self._put_amiss(self._result)
        self._enter()

    def _judge_result(self) -> None:
        finish(self._entered, time.perf_counter())
        if not self._are_alike():
            self._object(NotFinite, fingerprint.not_finite(self._ranks(), "gets", "from"))

    def _enter(self) -> None:
        """Into the ledgers: what we tell is sent as well."""
        self._entered = []
        if any(self._recorder.ledgers):
            self._entered = self._recorder.record(self._run_number(), time.perf_counter())

    def _run_number(self) -> int:
        return self._num_runs if self._counter is None else self._counter[0]

    def _put_amiss(self, array: Array | None) -> None:
        if self._is_strict:
            fingerprint.put(self._message, "amiss", _amiss(self._backend, array))

    def _are_alike(self) -> bool:
        """Whether there is nothing to look at more closely, found out quickly."""
        if self._message[AMISS_AT]:
            return False
        mine, told = self._mine[:NUM_COMPARED].tobytes(), self._table.tobytes()
        return all(told.startswith(mine, start) for start in range(0, len(told), NUM_BYTES))

    def _ranks(self) -> list[Fingerprint]:
        return [fingerprint.decode(row.tobytes()) for row in self._table]

    def _object(self, kind: type[CollectiveError], sentence: str | None) -> None:
        """Raise, on all ranks, which count their calls alike from then on."""
        if sentence is not None:
            self._checker.numbers.catch_up(max(int(rank.num_calls) for rank in self._ranks()))
            self.objection = kind(sentence)
            raise self.objection


def _end(opening: list[Action], stages: Sequence[Stage]) -> list[Action]:
    """What is done last."""
    return stages[-1].actions if stages else opening


def _watched(array: Array | None) -> Array | None:
    """An array, if it can hold what is not finite."""
    return None if array is None or not has_infinities(array.dtype) else array


def _amiss(backend: Backend, array: Array | None) -> str:
    """The first value that is not finite, and where it is; nothing if there is none."""
    found = None if array is None else backend.first_not_finite(array.reshape(-1))
    if array is None or found is None:
        return ""
    index, value = found
    place = [int(i) for i in np.unravel_index(index, tuple(array.shape))]
    return f"{value} at {place}"


def _place() -> str:
    """The line of the program that makes the call: the first outside this package."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
