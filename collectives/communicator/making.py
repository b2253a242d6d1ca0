"""What happens with a prepared call: `Calling` makes it, and `Planning` makes a plan of it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol

from collectives.arrays import Arrays, validation
from collectives.communicator.exchange import SentReceived
from collectives.communicator.prepare import Caller, Deferred, Ready
from collectives.programs import CallSpec
from collectives.runtime import (
    CallId,
    FastPlans,
    Plan,
    Session,
    Steps,
    cached,
    cached_on_device,
    can_cache,
    can_cache_on_device,
    ends_of,
    make_message_plan,
    make_plan,
)
from collectives.selection import preferred, select

# These send a header first if there is no `out=`.
_WITH_HEADER = ("broadcast", "scatter")


class Options(NamedTuple):
    """The checked options that every call has."""

    collective: str
    algorithm: str | None
    async_op: bool
    timeout: float | None


class Maker(Protocol):
    """Makes a result, a `Work` or a `Plan` of a prepared call."""

    session: Session
    caller: Caller

    @property
    def cached(self) -> Session | FastPlans:
        """The object whose `fast_calls` is the cache of ready calls or plans."""

    def check(self, async_op: object, timeout: object) -> None:
        """Raise TypeError for options that are not allowed here."""

    def make(
        self, options: Options, prepared: Ready | Deferred, key: tuple[Any, ...] | None
    ) -> Any:
        """Make a collective call.  `key`: its key in the cache, if it may be kept there."""

    def make_message(
        self, options: Options, arrays: Arrays, tag: int, dest: int | None, source: int | None
    ) -> Any:
        """Make a send, a receive, or both at once."""


class Calling:
    """Makes calls, or begins them if they are asynchronous."""

    def __init__(self, session: Session) -> None:
        self.session = self.cached = session
        self.caller = Caller(session, may_copy=True)

    def check(self, async_op: object, timeout: object) -> None:
        """Do nothing: all options are allowed."""

    def make(
        self, options: Options, prepared: Ready | Deferred, key: tuple[Any, ...] | None
    ) -> Any:
        steps = partial(self._steps, options, prepared, key)
        if options.async_op:
            return self.session.started(steps, options.timeout)
        return self.session.call(steps, options.timeout)

    def _steps(
        self,
        options: Options,
        prepared: Ready | Deferred,
        key: tuple[Any, ...] | None,
        call_id: CallId,
    ) -> Steps:
        """The steps of a call."""
        if isinstance(prepared, Ready):
            return (yield from self._steps_of_ready(options, prepared, key, call_id))
        with self.session.turn_of(call_id):
            ready = yield from prepared(call_id)
            return (yield from self._steps_of_ready(options, ready, None, call_id))

    def _steps_of_ready(
        self, options: Options, ready: Ready, key: tuple[Any, ...] | None, call_id: CallId
    ) -> Steps:
        """The steps of a call whose arrays are known."""
        session, spec = self.session, spec_of(self.session, options, ready, call_id.is_blocking)
        if key is not None and can_cache(session, key, spec, ready.arrays):
            yield from cached(session, key, spec, ready.arrays, call_id, ready.unwritten_out)
        elif key is not None and can_cache_on_device(
            session, spec, ready.arrays, ready.result, ready.has_out
        ):
            yield from cached_on_device(session, key, spec, ready.arrays, call_id)
        else:
            yield from session.perform(spec, ready.arrays, call_id)
        return ready.result

    def make_message(
        self, options: Options, arrays: Arrays, tag: int, dest: int | None, source: int | None
    ) -> Any:
        session, name = self.session, options.collective

        def steps() -> Steps:
            yield session.runs.message(ends_of(name, arrays, dest, source), arrays, tag)
            return arrays.target

        return session.message(steps(), options.timeout, options.async_op)


class Planning:
    """Makes plans."""

    def __init__(self, session: Session) -> None:
        self.session, self.cached = session, FastPlans(session)
        self.caller = Caller(session, may_copy=False)

    def check(self, async_op: object, timeout: object) -> None:
        if async_op or timeout is not None:
            raise TypeError("a plan takes no async_op or timeout: start() it, or run(timeout)")

    def make(
        self, options: Options, prepared: Ready | Deferred, key: tuple[Any, ...] | None
    ) -> Plan:
        plan: Plan = self.session.call(partial(self._steps, options, prepared, key), None)
        return plan

    def _steps(
        self,
        options: Options,
        prepared: Ready | Deferred,
        key: tuple[Any, ...] | None,
        call_id: CallId,
    ) -> Steps:
        """Make the plan, after a header or counts if they are needed."""
        ready = prepared if isinstance(prepared, Ready) else (yield from prepared(call_id))
        spec = spec_of(self.session, options, ready, is_blocking=False)
        if not isinstance(prepared, Ready) or ready.unwritten_out is not None:
            key = None
        return make_plan(self.session, spec, ready.arrays, ready.result, call_id, key)

    def make_message(
        self, options: Options, arrays: Arrays, tag: int, dest: int | None, source: int | None
    ) -> Plan:
        return make_message_plan(self.session, options.collective, arrays, tag, dest, source)


def checked_options(
    maker: Maker,
    collective: str,
    algorithm: str | None,
    async_op: object,
    timeout: object,
    counts: object = None,
    shards: object = None,
) -> Options:
    """Check the options that every call has, before any message is sent.

    `counts` and `shards`: those of the call, which can restrict its algorithm.
    """
    maker.check(async_op, timeout)
    if algorithm is None:
        algorithm = preferred(collective)
    if isinstance(counts, SentReceived):
        algorithm = select.local(collective, algorithm)
    algorithm = select.with_shards(collective, algorithm, shards)
    if algorithm is not None:
        select.check(collective, algorithm, maker.caller.size)
    return Options(collective, algorithm, bool(async_op), validation.seconds(timeout))


def spec_of(session: Session, options: Options, ready: Ready, is_blocking: bool) -> CallSpec:
    """The description of the call, from which it is compiled, cached and compared."""
    has_out = {True: "given", False: "not given"}[ready.has_out]
    return session.spec(
        options.collective,
        ready.arrays,
        ready.counts,
        root=ready.root,
        op=ready.op,
        algorithm=options.algorithm,
        is_blocking=is_blocking,
        out=has_out if options.collective in _WITH_HEADER else "",
    )
