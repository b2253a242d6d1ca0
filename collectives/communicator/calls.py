"""The way of every collective call: an earlier call is repeated, or a new one is made.

The key of a call consists of its request, which is the collective with all arguments except the
arrays, and of the shape and dtype of the arrays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from inspect import cleandoc
from typing import Any, NamedTuple, TypeVar

from numpy import ndarray

from collectives.arrays import Array, Backend, is_device_array, validation
from collectives.programs import CallSpec
from collectives.runtime import (
    MISFIT,
    Arguments,
    Key,
    Prepared,
    Session,
    Steps,
    Work,
    make_plan,
    perform_call,
)
from collectives.selection import preferences, preferred, select

Method = TypeVar("Method", bound=Callable[..., Any])
Exchange = Callable[[Work[Any]], Generator[Prepared, None, Arguments]]
"""Receives a header or counts, which complete the arguments of a call."""

# These send a header first if there is no `out=`.
_WITH_HEADER = ("broadcast", "scatter")

_SHARED_PARAMETERS = """\
algorithm : str, optional
    A name from `collectives.algorithms.names`, with its options written as in a call:
    ``"bruck(radix=4)"``.  None: chosen by size.
async_op : bool
    Whether to return a `Work` at once, whose `wait()` returns the result.
timeout : float, optional
    The time limit in seconds.  None: the communicator's `timeout`."""
_SHARED_ERRORS = """\
Raises
------
TypeError, ValueError
    For an invalid argument, before any message is sent.
CollectiveTimeout
    After `timeout` seconds.  The message names the ranks that the call waits for; the call
    continues in ``error.work.wait()``.
CollectiveError
    If an earlier call failed half-way and left the communicator unusable."""
_BEFORE_SECTION = re.compile(r"\n\n(?=\w+\n-+\n)")


class SentReceived(NamedTuple):
    """The counts of one rank in an all-to-all, with which ranks exchange no counts.

    Attributes
    ----------
    sent : sequence of int
        The rows from here to each rank.
    received : sequence of int
        The rows from each rank to here.

    Examples
    --------
        counts = collectives.SentReceived(sent=[2, 0, 5], received=[2, 1, 1])    # on rank 0 of 3
    """

    sent: Sequence[int]
    received: Sequence[int]


class Calls:
    """What makes the calls of one rank, or plans of them."""

    is_planning = False  # whether a call returns a plan

    def __init__(self, session: Session) -> None:
        pool = session.pool
        self._session, self._pool = session, pool
        self._latest = pool.latest_plans if self.is_planning else pool.latest
        self.rank, self.size = session.transport.rank, session.transport.size

    def _readable(self, x: object) -> tuple[Backend, Array]:
        """Return an array to read from, C-contiguous: itself or a copy."""
        backend, array = validation.readable(x)
        if array is not x and self.is_planning:
            raise ValueError(
                "x must be C-contiguous, because every run of a plan reads it in place"
            )
        return backend, array

    def _refuse_options_of_calls(self, async_op: object, timeout: object) -> None:
        """Raise TypeError for options that plans do not have."""
        if self.is_planning and (async_op or timeout is not None):
            raise TypeError("a plan takes no async_op or timeout: start() it, or run(timeout)")

    def _steps(
        self,
        collective: str,
        checked: Arguments | Exchange,
        algorithm: str | None,
        key: Key | None,
        work: Work[Any],
    ) -> Steps:
        """Yield what a call runs: first the exchange of a header or counts, if needed."""
        session, is_complete = self._session, isinstance(checked, Arguments)
        has_turn = not (is_complete or self.is_planning)
        with session.turn_of(work) if has_turn else nullcontext():
            arguments = checked if isinstance(checked, Arguments) else (yield from checked(work))
            is_blocking = work.is_blocking and not self.is_planning
            spec = _spec(session, collective, arguments, algorithm, is_blocking=is_blocking)
            key = key if is_complete else None
            if self.is_planning:
                return make_plan(session, work, spec, arguments, key)
            yield from perform_call(session, work, spec, arguments, key)
        return arguments.result


def _spec(
    session: Session,
    collective: str,
    arguments: Arguments,
    algorithm: str | None,
    *,
    is_blocking: bool,
) -> CallSpec:
    """Return the description of a call, from which it is compiled, found again and compared."""
    has_out = {True: "given", False: "not given"}[arguments.has_out]
    return session.spec(
        collective,
        arguments.arrays,
        arguments.counts,
        root=arguments.root,
        op=arguments.op,
        algorithm=algorithm,
        is_blocking=is_blocking,
        out=has_out if collective in _WITH_HEADER else "",
    )


def collective(method: Method) -> Method:
    """Make a collective of a method that checks its arguments.

    The options that all collectives share are added to the sections of its docstring.
    """
    name = method.__name__.removeprefix("_")

    @wraps(method)
    def call(
        self: Any,
        x: Any = None,
        *args: Any,
        out: Any = None,
        algorithm: Any = None,
        async_op: Any = False,
        timeout: Any = None,
        **named: Any,
    ) -> Any:
        if timeout is not None:
            timeout = validation.seconds(timeout)
        request: Any = name, async_op, out is None, algorithm, preferences()
        if args or named:
            request += *map(_typed, args), *named, *map(_typed, named.values())
        try:
            latest = self._latest.get(request)
        except TypeError:  # an argument is not hashable
            latest = request = None
        if latest is not None:
            result = latest(x, out, timeout)
            if result is not MISFIT:
                return result
        key = None if request is None else _key(request, self.is_planning, x, out)
        repeat = None if key is None else self._pool.find(key)
        if repeat is not None and repeat is not latest:
            result = repeat(x, out, timeout)
            if result is not MISFIT:
                return result
        self._refuse_options_of_calls(async_op, timeout)
        restricting = named.get("counts"), named.get("shards")
        algorithm = _checked_algorithm(name, algorithm, self.size, *restricting)
        checked = method(self, x, *args, out=out, algorithm=algorithm, **named)
        steps = partial(self._steps, name, checked, algorithm, key)
        make = self._session.started if async_op else self._session.call
        return make(steps, timeout)

    call.__doc__ = _with_shared_sections(cleandoc(method.__doc__ or ""))
    return call  # type: ignore[return-value]


def _with_shared_sections(docstring: str) -> str:
    """Return the docstring of a collective with the parameters and errors that all share.

    Its sections are Parameters, Returns, and perhaps others that come after Raises.
    """
    summary, *sections = _BEFORE_SECTION.split(docstring)
    if not sections:
        return summary
    parameters, result, *others = sections
    parameters = f"{parameters}\n{_SHARED_PARAMETERS}"
    return "\n\n".join([summary, parameters, result, _SHARED_ERRORS, *others])


def _checked_algorithm(
    collective: str, algorithm: str | None, size: int, counts: object, shards: object
) -> str | None:
    """Return the algorithm of a call; None if it is chosen by size.

    `counts` and `shards` of the call can restrict its algorithm.

    Raises
    ------
    TypeError, ValueError
        If the algorithm cannot serve.
    """
    if algorithm is None:
        algorithm = preferred(collective)
    if algorithm is None and counts is None and shards is None:
        return None
    if isinstance(counts, SentReceived):
        algorithm = select.local(collective, algorithm)
    algorithm = select.with_shards(collective, algorithm, shards)
    if algorithm is not None:
        select.check(collective, algorithm, size)
    return algorithm


def _typed(argument: Any) -> tuple[Any, ...]:
    """Return an argument with its type; a list, such as counts, with the types of its entries.

    The type matters because 1.0 and True are equal to 1 but are not valid as a root, and because
    `SentReceived` can be equal to a table of counts.
    """
    if isinstance(argument, (list, tuple)):
        entries = tuple(map(_typed, argument))
        return entries if type(argument) in (list, tuple) else (type(argument), *entries)
    return type(argument), argument


def _key(request: tuple[Any, ...], is_plan: bool, x: Any, out: Any) -> Key | None:
    """Return the key of a call; None if calls on such arrays are not repeated."""
    like = out if x is None else x
    if type(like) is ndarray:
        return request, is_plan, like.shape, like.dtype
    if like is None:
        return request, is_plan
    if is_device_array(like):
        return request, is_plan, type(like), like.shape, like.dtype
    return None
