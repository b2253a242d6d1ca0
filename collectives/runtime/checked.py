"""Checked mode: the ranks tell each other what they are about to call, and stop where they differ.

Before a call's own messages every rank gets from every rank 16 bytes, a digest of the call as that
rank sees it.  Where digests differ the ranks tell each other all of it.  All then see the same and
say the same, and nothing of the call is sent.  In the mode "finite" values are looked at as well:
those that are brought before anything is sent, and afterwards those that a reduction has made.

What is told has a schedule of its own, the same whatever the call, and numbers of its own: on
every rank the n-th call that is started meets the n-th of the others, however they are made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives import algorithms
from collectives.arrays import (
    HOST,
    OPERATORS,
    Array,
    Arrays,
    Backend,
    Bytes,
    Operator,
    has_infinities,
    num_elements,
)
from collectives.diagnostics import Ancestry, Recorder
from collectives.engines import Operands
from collectives.errors import CollectiveError, CollectiveMismatch, NotFinite
from collectives.programs import CallSpec, Counts, compile_call
from collectives.runtime import fingerprint
from collectives.runtime.fingerprint import AMISS, Digest, Fingerprint
from collectives.runtime.runs import Run
from collectives.runtime.work import Owner as Caller
from collectives.runtime.work import Steps, Work, break_off
from collectives.schedule import SPECS

Mode = Literal["calls", "finite"]
LABEL, ALGORITHM = "check", "bruck"  # in the ledger; it serves any p in log p rounds

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIKE_ANY_OTHER = ("exscan", "barrier")  # in place or not: it concerns not every rank


# What a call looks like


@lru_cache(maxsize=1024)
def describe(spec: CallSpec, has_both: bool) -> Fingerprint:
    """What all ranks must agree on, as far as this one knows it.

    `has_both`: whether this rank has an input and an output that are not empty.
    """
    kind, shape = SPECS[spec.collective], spec.shape
    layout = "" if shape is None else str(shape)
    if shape is not None and not kind.has_pieces:  # these join or divide rows
        layout = f"({', '.join(['*', *map(str, shape[1:])])})"
    is_whole = kind.has_pieces or shape is None
    return Fingerprint(
        spec.label or spec.collective,
        dtype="" if shape is None else str(spec.dtype),
        counts="" if is_whole else _rows(spec.counts, num_elements((shape or ())[1:])),
        op="" if spec.op is None else _operator(spec.op),
        root=str(spec.root) if kind.is_rooted else "",
        algorithm=_algorithm(spec),
        in_place="" if kind.is_rooted else _in_place(spec, has_both),
        layout=layout,
        out=spec.out,
        blocking=spec.blocking,
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


def _algorithm(spec: CallSpec) -> str:
    options = ", ".join(f"{name}={value}" for name, value in spec.options)
    return f"{spec.algorithm.name}({options})" if options else spec.algorithm.name


def announced(collective: str, like: Array | None, counts: Sequence[int] | None) -> dict[str, str]:
    """What the ranks tell each other where a header goes first.

    `like` and `counts`: what this rank knows of the root's array and its rows, if anything.
    """
    layout = "" if like is None else str(tuple(like.shape))
    if like is not None and not SPECS[collective].has_pieces:
        layout = f"({', '.join(['*', *map(str, like.shape[1:])])})"
    return {
        "collective": collective,
        "dtype": "" if like is None else str(like.dtype),
        "counts": "" if counts is None else _rows(tuple(counts), 1),
        "algorithm": "",
        "layout": layout,
        "out": "not given",
    }


def _in_place(spec: CallSpec, has_both: bool) -> str:
    """An array without elements is in no place."""
    if spec.collective in _LIKE_ANY_OTHER or not has_both:
        return ""
    return "no" if spec.aliasing == "none" else "yes"


# What is exchanged


class Owner(Caller, Protocol):
    """Whose calls are compared: a session."""

    ancestry: Ancestry

    @property
    def num_calls(self) -> int:
        """How many calls there have been."""

    @property
    def checks(self) -> NDArray[np.int64]:
        """How many comparisons there have been."""

    @property
    def checks_tags(self) -> range:
        """The tags that they have in turns."""

    def next_number(self) -> int:
        """The number of a new call."""

    def catch_up(self, num_calls: int) -> None:
        """There have been so many on another rank."""


class Compared:
    """A call that the ranks compare, before a run and with messages of this tag.

    `says`: what of its fingerprint does not follow from the spec.
    """

    def __init__(
        self, spec: CallSpec, arrays: Arrays, run: Run, tag: int, says: Mapping[str, str]
    ) -> None:
        self.spec, self.arrays, self.says, self.tag = spec, arrays, says, tag
        self.name, self.title, self.number = run.name, run.title, run.number
        self.place = "" if spec.blocking == "yes" else _place()

    def fingerprint(self, compares_place: bool) -> Fingerprint:
        """What is compared, but for values."""
        source, target = self.arrays.source, self.arrays.target
        has_both = source is not None and target is not None and bool(source.size and target.size)
        found = describe(self.spec, has_both)._replace(
            call=self.name.removesuffix("a"), **self.says
        )
        return found if compares_place else found._replace(in_place="")


class Checker:
    """Compares the calls of one communicator.

    `compares_place`: whether ranks must agree on being in place; not if that is the choice of a
    layer above, which brings some ranks' data together elsewhere.  `objection`: what all ranks
    have raised last, together.
    """

    def __init__(self, owner: Owner, mode: Mode) -> None:
        self._owner, self.mode = owner, mode
        self.compares_place = True
        self.objection: CollectiveError | None = None

    def before(self, call: Compared) -> Steps:
        """All ranks see the same and go on, or raise the same."""
        amiss = self._amiss(call, call.arrays.source)
        ranks = yield from self._told(call, amiss)
        if ranks:
            self._judge(ranks)

    def after(self, call: Compared) -> Steps:
        """The same for the values that a reduction has made, if they are looked at."""
        if self.mode == "finite" and call.spec.op is not None:
            amiss = self._amiss(call, call.arrays.target)
            ranks = yield from self._told(call, amiss)
            if ranks:
                self._object(ranks, NotFinite, fingerprint.not_finite(ranks, "gets", "from"))

    def _told(self, call: Compared, amiss: str) -> Steps:
        """The fingerprints of all ranks; none if their digests say that they are alike."""
        mine = self._mine(call)._replace(amiss=amiss)
        digest = AMISS if amiss else self.digest(call).numbered(call.number)
        told = yield from self._exchanged(np.array(digest, np.uint64).view(np.uint8), call)
        if not amiss and (told == told[0]).all():
            return []
        return (yield from self._all_told(call, mine))

    def digest(self, call: Compared) -> Digest:
        """That of a call, but for its number."""
        found = call.fingerprint(self.compares_place)
        unnumbered = found.call.removesuffix(str(call.number))
        return fingerprint.digest(found._replace(call=unnumbered, mode=self.mode))

    def _all_told(self, call: Compared, mine: Fingerprint) -> Steps:
        """The fingerprints of all ranks."""
        place = call.place or _place()
        mine = mine._replace(place=place)
        message = np.frombuffer(fingerprint.encode(mine), np.uint8)
        told = yield from self._exchanged(message, call)
        return [fingerprint.decode(row.tobytes()) for row in told]

    def differ(self, call: Compared) -> Steps:
        """Some digests are not alike: raise, on all ranks, how the calls differ, if they do."""
        self._judge((yield from self._all_told(call, self._mine(call))))

    def _mine(self, call: Compared) -> Fingerprint:
        """What this rank has to tell of a call that starts now."""
        found = call.fingerprint(self.compares_place)
        return found._replace(mode=self.mode, num_calls=str(self._owner.num_calls))

    def _judge(self, ranks: Sequence[Fingerprint]) -> None:
        self._object(ranks, CollectiveMismatch, fingerprint.difference(ranks))
        self._object(ranks, NotFinite, fingerprint.not_finite(ranks, "brings", "to"))

    def steps(self, call: Compared) -> CheckedSteps:
        """What goes before a cached call that looks like this."""
        return CheckedSteps(self, self._owner, call)

    def _exchanged(self, mine: Bytes, call: Compared) -> Steps:
        """Every rank's message on every rank, one row each."""
        table = np.empty((self._owner.transport.size, mine.size), np.uint8)
        number = self._owner.num_calls
        named = partial(_name, call.name)
        run = exchange(self._owner, mine, table.reshape(-1), call, named, number)
        run.part_of = call.title
        yield run
        return table

    def _amiss(self, call: Compared, array: Array | None) -> str:
        """The first value that is not finite, and where it is, if that is looked for."""
        if self.mode != "finite":
            return ""
        return _amiss(call.arrays.backend, _watched(array))

    def _object(
        self, ranks: Sequence[Fingerprint], kind: type[CollectiveError], sentence: str | None
    ) -> None:
        """Raise, on all ranks, which count their calls alike from then on."""
        if sentence is not None:
            self._owner.catch_up(max(int(rank.num_calls) for rank in ranks))
            self.objection = kind(sentence)
            raise self.objection


@lru_cache(maxsize=64)
def _exchange(size: int, num_bytes: int) -> CallSpec:
    """The call by which ranks tell each other so many bytes."""
    algorithm = algorithms.info("all_gather", ALGORITHM)
    options = tuple(algorithm.options.items())
    bytes_each = (num_bytes,) * size
    return CallSpec("all_gather", algorithm, options, 1, ALGORITHM, np.dtype(np.uint8), bytes_each)


def _name(name: str, _: int) -> str:
    return name


def exchange(
    owner: Owner,
    mine: Bytes,
    table: Bytes,
    call: Compared,
    named: Callable[[int], str],
    number: int,
) -> Run:
    """The run that brings every rank's message to every rank."""
    transport = owner.transport
    program = compile_call(_exchange(transport.size, mine.size), transport.rank, transport.size)
    operands = Operands(HOST, mine, table, np.empty(program.num_scratch, np.uint8))
    execution = transport.execution(program, operands, call.tag)
    recorder = Recorder((LABEL, ALGORITHM), named, program.sent, owner.ancestry, transport.rank)
    run = Run(transport, program, execution, recorder)
    run.number, run.is_ahead, run.among = number, True, f"{program.num_rounds} of its check"
    return run


class CheckedSteps:
    """The comparison before a cached call: its digests, exchanged by compiled code.

    `call`: the first that looked so, from which the others differ in their numbers.
    """

    def __init__(self, checker: Checker, owner: Owner, call: Compared) -> None:
        self._checker, self._owner = checker, owner
        self._spec, self._says = call.spec, call.says
        self._has_result = call.arrays.target is not None
        self._digest = checker.digest(call)
        self._mine = np.zeros(2, np.uint64)
        self._table = np.zeros((owner.transport.size, 2), np.uint64)
        mine, table = self._mine.view(np.uint8), self._table.reshape(-1).view(np.uint8)
        self._arrays = mine, table
        self._run = exchange(owner, mine, table, call, str, 0)
        self._execution = self._run.reusable
        log, tags = self._run.log, owner.checks_tags
        self._execution.accept(log, self._run.key, owner.checks, mine, table, tags)
        self._answer = 0

    def are_alike(self, number: int, patience: int) -> bool:
        """Whether all ranks have told, by now, that they make this call; else see `steps`."""
        mine, (own, table) = self._mine, self._arrays
        mine[0], mine[1] = self._digest.numbered(number)
        execution = self._execution
        try:
            self._answer = execution.loop.run(execution.at, id(own), id(table), patience)
            if self._answer:
                return False
        except BaseException as error:
            work = Work.of(self._owner, self._run, own, table)
            work.is_blocking = True
            break_off(work, self._run, error)
            raise
        return bool(table.tobytes() == own.tobytes() * len(self._table))

    def steps(self, run: Run, x: Array | None, out: Array | None) -> Steps:
        """The rest of a call of which it is not known whether all are alike."""
        execution, checker = self._execution, self._checker
        if self._answer:
            execution.began(self._answer)
            self._run.has_begun()
            run.number = self._owner.num_calls + 1
            self._run.part_of = run.title
            yield self._run
        run.number = self._owner.next_number()
        if not (self._table == self._mine).all():
            call = Compared(self._spec, Arrays(HOST, x, out), run, execution.tag, self._says)
            yield from checker.differ(call)
        run.reusable.place(x, out)
        yield run
        return out if self._has_result else None


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
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
