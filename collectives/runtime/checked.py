"""Checked mode: the ranks tell each other what they are about to call, and stop where they differ.

Before a call's own messages every rank gets from every rank 16 bytes, a digest of the call as that
rank sees it.  Where digests differ the ranks tell each other all of it.  All then see the same and
say the same, and nothing of the call is sent.  In the mode "finite" values are looked at as well:
those that are brought before anything is sent, and afterwards those that a reduction has made.

What is told has a schedule of its own, the same whatever the call, and numbers of its own: on
every rank the n-th call that is started meets the n-th of the others, however they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Literal, Protocol

import numpy as np

from collectives import algorithms
from collectives.arrays import (
    HOST,
    Array,
    Arrays,
    Backend,
    Bytes,
    has_infinities,
)
from collectives.diagnostics import Ancestry, Recorder
from collectives.engines import Operands
from collectives.errors import CollectiveError, CollectiveMismatch, NotFinite
from collectives.programs import CallSpec, compile_call
from collectives.runtime import fingerprint
from collectives.runtime.description import Compared, line_of_caller
from collectives.runtime.fingerprint import AMISS, Digest, Fingerprint
from collectives.runtime.run import Run
from collectives.runtime.turns import Numbering
from collectives.runtime.work import Owner as Caller
from collectives.runtime.work import Steps, Work, break_off

Mode = Literal["calls", "finite"]
LABEL, ALGORITHM = "check", "bruck"  # in the ledger; it serves any p in log p rounds


class Owner(Caller, Protocol):
    """Whose calls are compared: a session."""

    ancestry: Ancestry

    numbering: Numbering


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
        place = call.place or line_of_caller()
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
        return found._replace(mode=self.mode, num_calls=str(self._owner.numbering.num_calls))

    def _judge(self, ranks: Sequence[Fingerprint]) -> None:
        self._object(ranks, CollectiveMismatch, fingerprint.difference(ranks))
        self._object(ranks, NotFinite, fingerprint.not_finite(ranks, "brings", "to"))

    def steps(self, call: Compared) -> CheckedSteps:
        """What goes before a cached call that looks like this."""
        return CheckedSteps(self, self._owner, call)

    def _exchanged(self, mine: Bytes, call: Compared) -> Steps:
        """Every rank's message on every rank, one row each."""
        table = np.empty((self._owner.transport.size, mine.size), np.uint8)
        number = self._owner.numbering.num_calls
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
            self._owner.numbering.catch_up(max(int(rank.num_calls) for rank in ranks))
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
        log, tags = self._run.log, owner.numbering.check_tags
        self._execution.accept(
            log, self._run.key, owner.numbering.num_checks_made, mine, table, tags
        )
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
            run.number = self._owner.numbering.num_calls + 1
            self._run.part_of = run.title
            yield self._run
        run.number = self._owner.numbering.next_number()
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
