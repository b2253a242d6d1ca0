"""Checked mode: the ranks compare what they are about to call, and all raise if they differ.

Before a call's own messages every rank receives 16 bytes from every rank: a digest of the call as
that rank sees it.  If digests differ, the ranks exchange the whole description, called fingerprint.
So all ranks know the same and raise the same error, and nothing of the call is sent.  The mode
"finite" also checks values: a rank's input before anything is sent, and the result of a reduction.

A comparison has the same schedule for every call, and separate tags: on every rank the n-th call
that starts is compared with the n-th call of the other ranks, even if their calls differ.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache, partial
from typing import Literal, NoReturn

import numpy as np

from collectives import algorithms
from collectives.arrays import HOST, Array, Arrays, Backend, Bytes, has_infinities
from collectives.devices import Check
from collectives.engines import HEADER, MESSAGES, Execution, Operands
from collectives.errors import CollectiveError, CollectiveMismatch, NotFinite, on_all_ranks
from collectives.programs import CallSpec, compile_call
from collectives.runtime import fingerprint
from collectives.runtime.description import Compared, line_of_caller
from collectives.runtime.fingerprint import BAD_VALUE, Digest, Fingerprint
from collectives.runtime.prepared import Prepared, Shown
from collectives.runtime.preparing import Origin, recorder_of
from collectives.runtime.work import Steps, Work, end_interrupted

Mode = Literal["calls", "finite"]
LABEL, ALGORITHM = "check", "bruck"  # in the ledger; it serves any p in log p rounds


class Checker:
    """Compares the calls of one communicator.

    Attributes
    ----------
    compares_place : bool
        Whether the ranks must agree on being in place.  The drop-in for mpi4py sets it to False,
        because it copies the data of some ranks.
    """

    def __init__(self, owner: Origin, mode: Mode) -> None:
        self._owner, self.mode, self._board = owner, mode, owner.transport.board
        self.compares_place = True

    def before(self, call: Compared) -> Steps:
        """Yield the comparison before a call: all ranks continue, or all raise the same error."""
        self._board.note_check(call.check, HEADER if call.is_header else MESSAGES)
        bad_value = self._bad_value(call, call.arrays.source)
        ranks = yield from self._compare(call, bad_value)
        if ranks:
            self._refuse_differences(ranks, call)

    def after(self, call: Compared) -> Steps:
        """Yield the comparison after a reduction, if values are checked."""
        if self.mode == "finite" and call.spec.op is not None:
            bad_value = self._bad_value(call, call.arrays.target)
            ranks = yield from self._compare(call, bad_value)
            if ranks:
                sentence = fingerprint.not_finite(ranks, "gets", "from")
                self._raise_together(ranks, call, NotFinite, sentence)

    def _compare(self, call: Compared, bad_value: str) -> Steps:
        """Compare digests; return the fingerprints of all ranks, or none if all agree."""
        mine = self._own_fingerprint(call)._replace(bad_value=bad_value)
        digest = BAD_VALUE if bad_value else self.digest(call).numbered(call.number)
        rows = yield from self._exchange(np.array(digest, np.uint64).view(np.uint8), call)
        if not bad_value and (rows == rows[0]).all():
            return []
        return (yield from self._all_fingerprints(call, mine))

    def digest(self, call: Compared) -> Digest:
        """Return the digest of a call without its number."""
        own = call.fingerprint(self.compares_place)
        unnumbered = own.call.removesuffix(str(call.number))
        return fingerprint.digest(own._replace(call=unnumbered, mode=self.mode))

    def _all_fingerprints(self, call: Compared, mine: Fingerprint) -> Steps:
        """Exchange fingerprints; return those of all ranks."""
        place = call.place or line_of_caller()
        mine = mine._replace(place=place)
        message = np.frombuffer(fingerprint.encode(mine), np.uint8)
        rows = yield from self._exchange(message, call)
        return [fingerprint.decode(row.tobytes()) for row in rows]

    def refuse(self, call: Compared) -> Steps:
        """Exchange fingerprints after digests have differed, and raise if the calls differ."""
        ranks = yield from self._all_fingerprints(call, self._own_fingerprint(call))
        self._refuse_differences(ranks, call)

    def _own_fingerprint(self, call: Compared) -> Fingerprint:
        """Return the fingerprint of a call that starts now on this rank.

        A call on a device has its number already, and later calls may have started too.
        """
        num_calls = call.number if call.has_number else self._owner.numbering.num_calls
        own = call.fingerprint(self.compares_place)
        return own._replace(mode=self.mode, num_calls=str(num_calls))

    def _refuse_differences(self, ranks: Sequence[Fingerprint], call: Compared) -> None:
        self._raise_together(ranks, call, CollectiveMismatch, fingerprint.difference(ranks))
        self._raise_together(ranks, call, NotFinite, fingerprint.not_finite(ranks, "brings", "to"))

    @property
    def can_use_records(self) -> bool:
        """Whether ranks with arrays on devices compare by the records of their calls."""
        return self.mode == "calls" and self._board.has_all_ranks

    def on_device(self, call: Compared) -> Check:
        """Return the comparison before a call on devices."""
        digest, owner = np.array(self.digest(call), np.uint64).tobytes(), self._owner
        phase, site = owner.phase_of_call(), owner.site_of_call()

        def messages() -> Generator[Execution, None, None]:
            for run in self.before(call):
                run.begin(phase, site)
                try:
                    yield run.execution
                except GeneratorExit:
                    run.fail()
                    raise
                run.complete()

        return Check(self._board, digest, call.check, messages)

    def comparison(self, call: Compared) -> Comparison:
        """Return the comparison before later calls of the same kind, by compiled code."""
        return Comparison(self, self._owner, call)

    def _exchange(self, mine: Bytes, call: Compared) -> Steps:
        """Send every rank's message to every rank; return a table with a row for each rank."""
        table = np.empty((self._owner.transport.size, mine.size), np.uint8)
        number = self._owner.numbering.num_calls
        named = partial(_name, call.name)
        run = exchange(self._owner, mine, table.reshape(-1), call, named, number)
        run.part_of = call.title
        yield run
        return table

    def _bad_value(self, call: Compared, array: Array | None) -> str:
        """Return the first value that is not finite, with its index.

        It is "" if there is none, or if values are not checked.
        """
        if self.mode != "finite":
            return ""
        return _first_bad_value(call.arrays.backend, _watched(array))

    def stop(self, sentence: str) -> NoReturn:
        """Raise CollectiveMismatch in a call in which all ranks find the same difference."""
        raise on_all_ranks(CollectiveMismatch(sentence))

    def _raise_together(
        self,
        ranks: Sequence[Fingerprint],
        call: Compared,
        kind: type[CollectiveError],
        sentence: str | None,
    ) -> None:
        """Raise the same error on all ranks, whose next calls then have equal numbers."""
        if sentence is not None:
            self._board.acknowledge_refusal(call.check)
            self._owner.numbering.catch_up(max(int(rank.num_calls) for rank in ranks))
            raise on_all_ranks(kind(sentence))


@lru_cache(maxsize=64)
def _exchange_spec(size: int, num_bytes: int) -> CallSpec:
    """Return the all-gather in which each rank sends `num_bytes`."""
    algorithm = algorithms.info("all_gather", ALGORITHM)
    options = tuple(algorithm.options.items())
    bytes_each = (num_bytes,) * size
    return CallSpec("all_gather", algorithm, options, 1, ALGORITHM, np.dtype(np.uint8), bytes_each)


def _name(name: str, _: int) -> str:
    return name


def exchange(
    owner: Origin,
    mine: Bytes,
    table: Bytes,
    call: Compared,
    named: Callable[[int], str],
    number: int,
) -> Prepared:
    """Prepare what sends every rank's message to every rank."""
    transport = owner.transport
    program = compile_call(
        _exchange_spec(transport.size, mine.size), transport.rank, transport.size
    )
    operands = Operands(HOST, mine, table, np.empty(program.num_scratch, np.uint8))
    execution = transport.execution(program, operands, owner.numbering.check_tag(call.check))
    recorder = recorder_of(owner, (LABEL, ALGORITHM), named, program.sent)
    shown = Shown(recorder, f"{program.num_rounds} of its check")
    prepared = Prepared(transport, program, execution, shown)
    prepared.number, prepared.is_ahead = number, True
    prepared.scratch_bytes = call.scratch_bytes
    return prepared


class Comparison:
    """The comparison before calls of a kind; compiled code exchanges the digests.

    Attributes
    ----------
    call : Compared
        The first of these calls; the others differ from it only in their numbers.
    """

    def __init__(self, checker: Checker, owner: Origin, call: Compared) -> None:
        self._checker, self._owner = checker, owner
        self._spec, self._fields = call.spec, call.fields
        self._has_result = call.arrays.target is not None
        self._digest = checker.digest(call)
        self._mine = np.zeros(2, np.uint64)
        self._table = np.zeros((owner.transport.size, 2), np.uint64)
        mine, table = self._mine.view(np.uint8), self._table.reshape(-1).view(np.uint8)
        self._arrays = mine, table
        self._run = exchange(owner, mine, table, call, str, 0)
        self._execution, numbering = self._run.reusable, owner.numbering
        arrays = Arrays(HOST, mine, table)
        self._run.let_code_start(numbering.num_checks_made, arrays, numbering.check_tags)
        self._answer = 0

    def all_agree(self, number: int, max_wait: int) -> bool:
        """Return whether all digests have arrived and agree.

        If not, `steps` completes the call.
        """
        mine, (own, table) = self._mine, self._arrays
        mine[0], mine[1] = self._digest.numbered(number)
        owner, execution = self._owner, self._execution
        owner.transport.board.note_check(int(owner.numbering.num_checks_made[0]) + 1, MESSAGES)
        try:
            self._answer = execution.loop.run(execution.state_address, id(own), id(table), max_wait)
            if self._answer:
                return False
        except BaseException as error:
            work = Work.of(self._owner, self._run, own, table, is_blocking=True)
            end_interrupted(work, self._run, error)
            raise
        return bool(table.tobytes() == own.tobytes() * len(self._table))

    def steps(self, run: Prepared, x: Array | None, out: Array | None) -> Steps:
        """Yield the remaining steps if digests are missing or differ."""
        execution, checker = self._execution, self._checker
        if self._answer:
            execution.started(self._answer, *self._arrays)
            self._run.started_by_code()
            run.number = self._owner.numbering.num_calls + 1
            self._run.part_of = run.title
            yield self._run
        run.number = self._owner.numbering.next_number()
        if not (self._table == self._mine).all():
            number = int(self._owner.numbering.num_checks_made[0])
            call = Compared(self._spec, Arrays(HOST, x, out), run, number, self._fields)
            yield from checker.refuse(call)
        run.reusable.set_arrays(x, out)
        yield run
        return out if self._has_result else None


def _watched(array: Array | None) -> Array | None:
    """Return the array, or None if its dtype has only finite values."""
    return None if array is None or not has_infinities(array.dtype) else array


def _first_bad_value(backend: Backend, array: Array | None) -> str:
    """Return the first value that is not finite, with its index; "" if there is none."""
    entry = None if array is None else backend.first_not_finite(array.reshape(-1))
    if array is None or entry is None:
        return ""
    index, value = entry
    place = [int(i) for i in np.unravel_index(index, tuple(array.shape))]
    return f"{value} at {place}"
