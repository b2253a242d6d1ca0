"""From the description of a call to what it runs: its kind, a prepared call, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from collectives.arrays import Array, Arrays, Operator
from collectives.devices import OnDevice
from collectives.programs import CallSpec, Counts, compile_call
from collectives.runtime.compiled_support import is_fully_compiled
from collectives.runtime.description import Compared
from collectives.runtime.plan import Plan
from collectives.runtime.pool import Key, Kind
from collectives.runtime.prepared import Prepared
from collectives.runtime.preparing import Use, prepare_call
from collectives.runtime.repeat import Repeat
from collectives.runtime.session import Session
from collectives.runtime.work import Steps, Work


class Arguments(NamedTuple):
    """The checked arguments of a call, whose arrays are known.

    Attributes
    ----------
    counts : Counts
        See `collectives.programs.compile_lane`.
    result : array or None
        What the call returns.
    has_out : bool
        Whether the caller has passed `out`.
    unwritten_out : array or None
        The caller's `out`, if it is checked but not written on this rank.
    """

    arrays: Arrays
    counts: Counts
    result: Array | None
    has_out: bool
    root: int = 0
    op: Operator | None = None
    unwritten_out: Array | None = None


def perform(
    session: Session,
    work: Work[Any],
    spec: CallSpec,
    arrays: Arrays,
    *,
    is_ahead: bool = False,
    fields: Mapping[str, str] | None = None,
) -> Steps:
    """Yield what a call of the library itself runs, with the comparisons of checked mode.

    Parameters
    ----------
    is_ahead : bool
        Whether this is a header exchange that precedes the call itself.
    fields : mapping, optional
        What the ranks compare in checked mode, where that does not follow from the spec.
    """
    session.check()
    kind = _kind(session, "ahead" if is_ahead else "call", spec, arrays, work.is_blocking)
    tag = session.numbering.header_tag(work.number) if is_ahead else _tag(session, work)
    run = kind.take(arrays, tag, work.number)
    yield from _in_turn(session, work, run, spec, arrays, fields)


def perform_call(
    session: Session, work: Work[Any], spec: CallSpec, arguments: Arguments, key: Key | None
) -> Steps:
    """Yield what a call of a user runs; later calls of the same `key` may be made at once."""
    session.check()
    is_kept = spec.is_recurring or (key is not None and session.pool.is_repeated(key))
    what = work.is_blocking, arguments.unwritten_out is not None
    kind = _kind(session, "call", spec, arguments.arrays, what, is_kept=is_kept)
    run = kind.take(arguments.arrays, _tag(session, work), work.number)
    if key is not None and is_kept and _can_repeat(session, work, run, spec, arguments):
        _let_repeat(session, work, kind, run, spec, arguments, key)
    yield from _in_turn(session, work, run, spec, arguments.arrays)


def make_plan(
    session: Session, work: Work[Any], spec: CallSpec, arguments: Arguments, key: Key | None
) -> Plan:
    """Make a plan, which has the number of `work`; later plans of `key` may be made at once."""
    session.check()
    arrays, tag = arguments.arrays, session.numbering.async_tag(work.number)
    is_kept = arrays.backend.is_host and (
        spec.is_recurring or (key is not None and session.pool.is_repeated(key))
    )
    kind = _kind(session, "plan", spec, arrays, None, is_kept=is_kept)
    run = kind.take(arrays, tag, work.number)
    run.give = None  # before it is freed
    next_check = session.numbering.next_check
    steps = partial(with_checks, session, run, spec, arrays, next_check)
    give = kind.give if is_kept else None
    plan = Plan(session, run, steps, arguments.result, give)
    is_compiled = is_fully_compiled(session.transport, spec, arrays) and run.can_be_reusable
    if is_compiled or isinstance(run.execution, OnDevice):
        plan.let_code_start(arrays, tag)
    if is_compiled:
        run.execution.detach()  # of the arrays, which the plan keeps
    can_repeat = is_compiled and is_kept and session.checker is None and session.pool.is_open
    is_plain = spec.aliasing != "odd" and arguments.unwritten_out is None
    if key is not None and can_repeat and is_plain:
        if kind.like is None:
            kind.let_code_start(run.reusable)
        session.pool.add(key, Repeat(session, kind, run, arrays).plan)
    return plan


def _kind(
    session: Session,
    use: Use,
    spec: CallSpec,
    arrays: Arrays,
    what: Hashable,
    *,
    is_kept: bool = True,
) -> Kind:
    """Return the kind of calls that use prepared calls in this way.

    Parameters
    ----------
    what : hashable
        What else is equal for calls of one kind.
    is_kept : bool
        False: it is a new kind, for one call only.
    """
    program = compile_call(spec, session.transport.rank, session.transport.size)
    make = partial(prepare_call, session, spec, program, use)
    if not is_kept:
        return Kind(make, program)
    # Compiled code may be there later.
    key = use, spec, arrays.backend.name, what, session.transport.why_interpreted is None
    return session.pool.kind(key, make, program)


def _tag(session: Session, work: Work[Any]) -> int:
    """Return the tag of the messages of a call."""
    return session.numbering.tag(work.number, work.is_blocking)


def _can_repeat(
    session: Session, work: Work[Any], run: Prepared, spec: CallSpec, arguments: Arguments
) -> bool:
    """Return whether compiled code can make later calls like this one at once."""
    checker, is_plain = session.checker, work.is_blocking and not session.numbering.can_mix
    if not session.pool.is_open or (checker is not None and not is_plain):
        return False
    if isinstance(run.execution, OnDevice):
        has_new_result = arguments.result is not None and not arguments.has_out
        return checker is None and is_plain and not has_new_result
    if checker is not None and (checker.mode != "calls" or session.is_recorded):
        return False
    is_compiled = is_fully_compiled(session.transport, spec, arguments.arrays)
    return is_compiled and run.can_be_reusable and spec.aliasing != "odd"


def _let_repeat(
    session: Session,
    work: Work[Any],
    kind: Kind,
    run: Prepared,
    spec: CallSpec,
    arguments: Arguments,
    key: Key,
) -> None:
    """Let compiled code make later calls of this key at once."""
    arrays, unwritten = arguments.arrays, arguments.unwritten_out
    if isinstance(run.execution, OnDevice):
        run.execution.set_arrays(arrays.source, arrays.target)
    if session.pool.find(key) is not None:  # this call did not fit, perhaps because `x` was copied
        return
    if kind.like is None:
        like = arrays if unwritten is None else arrays._replace(target=unwritten)
        numbering = session.numbering
        run.let_code_start(numbering.num_calls_made, like, numbering.tags(work.is_blocking))
        kind.let_code_start(run.reusable)
    comparison = None
    if session.checker is not None:
        compared = Compared(spec, arrays, run, work.check_number, {})
        comparison = session.checker.comparison(compared)
    repeat = Repeat(session, kind, run, arrays, comparison)
    session.pool.add(key, repeat.call if work.is_blocking else repeat.start)


def _in_turn(
    session: Session,
    work: Work[Any],
    run: Prepared,
    spec: CallSpec,
    arrays: Arrays,
    fields: Mapping[str, str] | None = None,
) -> Steps:
    """Yield a run, in the order of calls on devices, with its comparisons in checked mode."""
    is_on_device = isinstance(run.execution, OnDevice)
    if work.has_turn and not run.is_ahead and not is_on_device:
        session.devices.turns.end(work.number)
    if session.checker is None:
        yield run
        return
    # The comparisons of several calls may end in different orders on different ranks.
    with session.turn_of(work) if is_on_device else nullcontext():
        yield from with_checks(session, run, spec, arrays, lambda: work.check_number, fields)


def with_checks(
    session: Session,
    run: Prepared,
    spec: CallSpec,
    arrays: Arrays,
    next_check: Callable[[], int],
    fields: Mapping[str, str] | None = None,
) -> Steps:
    """Yield a run, with the comparisons of checked mode before and after it.

    `next_check` returns the number of the comparison.
    """
    checker = session.checker
    if checker is None:
        yield run
        return
    call = Compared(spec, arrays, run, next_check(), fields or {})
    if isinstance(run.execution, OnDevice) and checker.can_use_records:
        call.has_number = not run.execution.is_plan
        run.execution.check = checker.on_device(call)
    else:
        yield from checker.before(call)
    if isinstance(run.execution, OnDevice):
        run.execution.waits_for_device = checker.mode == "finite"
    yield run
    yield from checker.after(call)
