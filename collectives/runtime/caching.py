"""Puts a call or a plan that is made for the first time into the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays import HOST, Array, Arrays
from collectives.devices import OnDevice, Tagged
from collectives.engines import Reusable
from collectives.programs import CallSpec
from collectives.runtime.cached_calls import (
    CachedCall,
    CachedPlan,
    CachedStart,
    CheckedCall,
    ResultForm,
)
from collectives.runtime.checked import Checker
from collectives.runtime.compiled_support import can_start_compiled, is_fully_compiled
from collectives.runtime.description import Compared
from collectives.runtime.numbering import CallId
from collectives.runtime.plan import Plan
from collectives.runtime.run import Run
from collectives.runtime.run_pool import ends_of
from collectives.runtime.session import Session
from collectives.runtime.work import Steps

Key = tuple[Any, ...]  # of `CallCache`


# Calls


def can_cache(session: Session, key: Key, spec: CallSpec, arrays: Arrays) -> bool:
    """Whether the execution of this call can serve later calls of the same key.

    False if the cache already has one: it could not serve this call, for example because `x` had
    to be copied first.  False for the first call with these counts, unless it is recurring.
    """
    return (
        session.fast_calls is session.call_cache
        and (session.checker is None or spec.blocking == "yes")
        and is_fully_compiled(session.transport, spec, arrays)
        and spec.aliasing != "odd"
        and session.call_cache.find(key) is None
        and (spec.is_recurring or session.call_cache.is_repeated(key))
    )


def cached(
    session: Session,
    key: Key,
    spec: CallSpec,
    arrays: Arrays,
    call_id: CallId,
    unwritten_out: Array | None = None,
) -> Steps:
    """The steps of a call, whose execution serves all later calls of this key.

    `unwritten_out`: an array for the result that is checked but not written.
    """
    session.check()
    make = partial(session.runs.new_call, spec)
    run = make(arrays, call_id.tag, call_id.number)
    numbering, form = session.numbering, arrays.target if unwritten_out is None else unwritten_out
    tags = numbering.tags(call_id.is_blocking)
    run.reusable.make_reusable(
        run.log, run.key, numbering.num_calls_made, arrays.source, form, tags
    )
    if not call_id.is_blocking:
        yield from _cached_start(session, key, spec, arrays, run, make)
    elif session.checker is not None:
        yield from _checked_call(session, session.checker, key, spec, arrays, run, call_id)
    else:
        session.call_cache.add(key, CachedCall(session, run, _result_form(arrays.target)))
        yield run
    run.reusable.detach()


def _cached_start(
    session: Session,
    key: Key,
    spec: CallSpec,
    arrays: Arrays,
    run: Run,
    make: Callable[[Arrays, int, int], Run],
) -> Steps:
    """An asynchronous call."""
    make_run = partial(_similar_run, run.reusable, make, _stand_ins(arrays))
    start = CachedStart(session, run, _result_form(arrays.target), make_run)
    session.call_cache.add(key, start)
    run.release = start.idle.append
    yield run


def _checked_call(
    session: Session,
    checker: Checker,
    key: Key,
    spec: CallSpec,
    arrays: Arrays,
    run: Run,
    call_id: CallId,
) -> Steps:
    """A blocking call in checked mode."""
    call = Compared(spec, arrays, run, call_id.check, {})
    steps = checker.steps(call)
    session.call_cache.add(key, CheckedCall(session, run, _result_form(arrays.target), steps))
    yield from session.with_checks(run, spec, arrays, lambda: call_id.check)


# Plans


class FastPlans:
    """Gives `comm.plan` the cache of plans, in place of the cache of calls."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def fast_calls(self) -> Any:
        """The cache of plans, or an empty cache while it cannot be used."""
        return self._session.fast_plans


def make_plan(
    session: Session,
    spec: CallSpec,
    arrays: Arrays,
    result: Array | None,
    call_id: CallId,
    key: Key | None = None,
) -> Plan:
    """A plan, which gets the number of a call when it is made.

    `key`: the key under which its execution is cached for plans like it; None: not cached.
    """
    session.check()
    is_compiled = is_fully_compiled(session.transport, spec, arrays)
    make = partial(session.runs.plan, spec)
    run = make(arrays, session.numbering.async_tag(call_id.number), call_id.number)
    next_check = session.numbering.next_check
    steps = partial(session.with_checks, run, spec, arrays, next_check)
    plan = _plan(session, run, steps, arrays, result, is_compiled)
    cache = session.plan_cache
    can_keep = session.fast_plans is cache and is_compiled and spec.aliasing != "odd"
    if key is not None and can_keep and cache.find(key) is None:
        make_run = partial(_similar_run, run.reusable, make, _stand_ins(arrays))
        cache.add(key, CachedPlan(session, run, _result_form(arrays.target), make_run))
    return plan


def make_message_plan(
    session: Session, name: str, arrays: Arrays, tag: int, dest: int | None, source: int | None
) -> Plan:
    """The plan of a send, a receive, or both."""
    session.check()
    is_compiled = can_start_compiled(session.transport, arrays)
    run = session.runs.message_plan(ends_of(name, arrays, dest, source), arrays, tag)
    is_compiled &= not isinstance(run.execution, Tagged)
    return _plan(session, run, partial(_steps_of, run), arrays, arrays.target, is_compiled)


def _plan(
    session: Session,
    run: Run,
    steps: Callable[[], Steps],
    arrays: Arrays,
    result: Array | None,
    is_compiled: bool,
) -> Plan:
    """Make a plan.  `is_compiled`: whether compiled code can run all of it."""
    plan, (_, source, target) = Plan(session, run, steps, result), arrays
    if is_compiled or isinstance(run.execution, OnDevice):
        run.reusable.make_reusable(run.log, run.key, plan.num_runs, source, target)
        plan.use_compiled_start(source, target)
    if is_compiled:
        run.reusable.detach()  # of the arrays, which the plan keeps
    return plan


def _steps_of(run: Run) -> Steps:
    """The steps of a call that consists of one run."""
    yield run


# Calls and plans


def _result_form(target: Array | None) -> ResultForm | None:
    """The shape and dtype of a result, if there is one."""
    return None if target is None else (tuple(target.shape), target.dtype)


def _stand_ins(arrays: Arrays) -> Arrays:
    """Arrays of the same form, which have no memory of their own."""
    source, target = (
        None if x is None else np.broadcast_to(np.empty((), x.dtype), x.shape) for x in arrays[1:]
    )
    return Arrays(HOST, source, target)


def _similar_run(
    execution: Reusable, make: Callable[[Arrays, int, int], Run], stand_ins: Arrays
) -> Run:
    """A run with a similar execution, which gets its arrays and tag later."""
    other = make(stand_ins, 0, 0)
    other.reusable.make_reusable_like(execution, other.key)
    return other
