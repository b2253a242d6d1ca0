"""From a call or a plan that is made for the first time to one in the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays import HOST, Array, Arrays
from collectives.engines import Reusable
from collectives.programs import CallSpec
from collectives.runtime.cached_calls import (
    CachedCall,
    CachedPlan,
    CachedStart,
    CheckedCall,
    Likeness,
)
from collectives.runtime.checked import Checker
from collectives.runtime.compiled_support import is_all_compiled, is_begun_by_code
from collectives.runtime.description import Compared
from collectives.runtime.plan import Plan
from collectives.runtime.run import Run
from collectives.runtime.run_pool import ends_of
from collectives.runtime.session import Session
from collectives.runtime.turns import Turn
from collectives.runtime.work import Steps

Key = tuple[Any, ...]  # of `CallCache`


# Calls


def can_cache(session: Session, key: Key, spec: CallSpec, arrays: Arrays) -> bool:
    """Whether calls of this key may go straight to an execution.

    Not where one is in the cache and could not serve this call, as it cannot serve an `x` that has
    to be copied first.
    """
    return (
        session.fast_calls is session.call_cache
        and (session.checker is None or spec.blocking == "yes")
        and is_all_compiled(session.transport, spec, arrays)
        and spec.aliasing != "odd"
        and session.call_cache.find(key) is None
    )


def cached(
    session: Session,
    key: Key,
    spec: CallSpec,
    arrays: Arrays,
    turn: Turn,
    untouched: Array | None = None,
) -> Steps:
    """The run of a call, whose execution serves all calls of this key from now on.

    `untouched`: an array for the result that is checked, but not written.
    """
    session.check()
    make = partial(session.runs.cached_call, spec)
    run = make(arrays, turn.tag, turn.number)
    numbering, form = session.numbering, arrays.target if untouched is None else untouched
    tags = range(0) if turn.is_blocking else numbering.async_tags
    run.reusable.accept(run.log, run.key, numbering.num_calls_made, arrays.source, form, tags)
    if not turn.is_blocking:
        yield from _cached_start(session, key, spec, arrays, run, make)
    elif session.checker is not None:
        yield from _checked_call(session, session.checker, key, spec, arrays, run, turn)
    else:
        session.call_cache.add(key, CachedCall(session, run, _likeness(arrays.target)))
        yield run
    run.reusable.let_go()


def _cached_start(
    session: Session,
    key: Key,
    spec: CallSpec,
    arrays: Arrays,
    run: Run,
    make: Callable[[Arrays, int, int], Run],
) -> Steps:
    """An asynchronous call."""
    another = partial(_another, run.reusable, make, spec.dtype)
    start = CachedStart(session, run, _likeness(arrays.target), another)
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
    turn: Turn,
) -> Steps:
    """A blocking call in checked mode."""
    call = Compared(spec, arrays, run, turn.check_tag, {})
    steps = checker.steps(call)
    session.call_cache.add(key, CheckedCall(session, run, _likeness(arrays.target), steps))
    yield from session.guarded(run, spec, arrays, lambda: turn.check_tag)


# Plans


class FastPlans:
    """Where calls make plans, the cached calls are those that make a plan again."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def fast_calls(self) -> Any:
        """The cache of plans, or an empty one where none may be used."""
        return self._session.fast_plans


def make_plan(
    session: Session,
    spec: CallSpec,
    arrays: Arrays,
    result: Array | None,
    turn: Turn,
    key: Key | None = None,
) -> Plan:
    """A plan, which takes the number of a call when it is made.

    `key`: under which others like it are made from what is known of this one; None: not so.
    """
    session.check()
    make = partial(session.runs.plan, spec)
    run = make(arrays, session.numbering.async_tag(turn.number), turn.number)
    is_compiled = is_all_compiled(session.transport, spec, arrays)
    next_tag = session.numbering.next_check_tag
    steps = partial(session.guarded, run, spec, arrays, next_tag)
    plan = _plan(session, run, steps, arrays, result, is_compiled)
    cache = session.plan_cache
    can_keep = session.fast_plans is cache and is_compiled and spec.aliasing != "odd"
    if key is not None and can_keep and cache.find(key) is None:
        another = partial(_another, run.reusable, make, spec.dtype)
        cache.add(key, CachedPlan(session, run, _likeness(arrays.target), another))
    return plan


def make_message_plan(
    session: Session, name: str, arrays: Arrays, tag: int, dest: int | None, source: int | None
) -> Plan:
    """The plan of a send, a receive, or both at once."""
    session.check()
    run = session.runs.message_plan(ends_of(name, arrays, dest, source), arrays, tag)
    is_compiled = is_begun_by_code(session.transport, arrays)
    return _plan(session, run, partial(_alone, run), arrays, arrays.target, is_compiled)


def _plan(
    session: Session,
    run: Run,
    steps: Callable[[], Steps],
    arrays: Arrays,
    result: Array | None,
    is_compiled: bool,
) -> Plan:
    """`is_compiled`: whether compiled code can do all of it."""
    plan, (_, source, target) = Plan(session, run, steps, result), arrays
    if is_compiled:
        run.reusable.accept(run.log, run.key, plan.num_runs, source, target)
        plan.begin_by_code(source, target)
        run.reusable.let_go()  # of the arrays, which the plan keeps
    return plan


def _alone(run: Run) -> Steps:
    """A run that nothing goes around."""
    yield run


# Both


def _likeness(target: Array | None) -> Likeness | None:
    """Shape and dtype of a result."""
    return None if target is None else (tuple(target.shape), target.dtype)


def _another(
    execution: Reusable, make: Callable[[Arrays, int, int], Run], dtype: np.dtype[Any]
) -> Run:
    """A run with an execution like this one; it gets its arrays and tag later."""
    other = make(Arrays(HOST, np.empty(0, dtype), None), 0, 0)
    other.reusable.accept_like(execution, other.key)
    return other
