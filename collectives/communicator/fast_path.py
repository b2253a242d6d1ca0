"""The fast path of every collective call: it reuses the execution of an earlier call.

The key of a call in the cache consists of its request, which is the collective with all arguments
except the arrays, and of the shape and dtype of the arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import cleandoc
from typing import Any, TypeVar

from numpy import ndarray

from collectives.arrays import is_device_array, validation
from collectives.communicator.making import checked_options
from collectives.runtime import MISFIT
from collectives.selection import preferences

Method = TypeVar("Method", bound=Callable[..., Any])

_SHARED = """
All collectives take these options as well:

- `algorithm`: a name from `collectives.algorithms.names(...)`, with its options written as in a
  call: "bruck(radix=4)".  None: chosen by size.
- `async_op`: if True, return a `Work` at once; its `wait()` returns the result.
- `timeout`: seconds.  None: the communicator's `timeout`.

Raises TypeError or ValueError for an invalid argument, before any message is sent;
`CollectiveTimeout`, which names the ranks that it waits for, after `timeout` seconds (the call then
continues in `error.work.wait()`); and `CollectiveError` if an earlier call failed half-way and left
the communicator unusable.
"""


def collective(method: Method) -> Method:
    """Make a collective of the method that prepares it.

    The description of the shared options is added to its docstring.
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
        ready = self._cached.fast_calls
        try:
            latest = ready.latest.get(request)
        except TypeError:  # an argument is not hashable
            latest = request = None
        if latest is not None:
            result = latest(x, out, timeout)
            if result is not MISFIT:
                return result
        key = None if request is None else _key(request, x, out)
        if key is not None and (other := ready.find(key)) is not None and other is not latest:
            result = other(x, out, timeout)
            if result is not MISFIT:
                return result
        restricting = named.get("counts"), named.get("shards")
        options = checked_options(self._maker, name, algorithm, async_op, timeout, *restricting)
        prepared = method(self, x, *args, out=out, algorithm=options.algorithm, **named)
        return self._maker.make(options, prepared, key)

    call.__doc__ = f"{cleandoc(method.__doc__ or '')}\n{_SHARED}"
    return call  # type: ignore[return-value]


def _typed(argument: Any) -> tuple[Any, ...]:
    """An argument with its type; a list, such as counts, with the types of its entries.

    The type matters because 1.0 and True are equal to 1 but are not valid as a root, and because
    `SentReceived` can be equal to a table of counts.
    """
    if isinstance(argument, (list, tuple)):
        entries = tuple(map(_typed, argument))
        return entries if type(argument) in (list, tuple) else (type(argument), *entries)
    return type(argument), argument


def _key(request: tuple[Any, ...], x: Any, out: Any) -> tuple[Any, ...] | None:
    """The key of a call; None if calls on such arrays are not cached."""
    like = out if x is None else x
    if type(like) is ndarray:
        return request, like.shape, like.dtype
    if like is None:
        return (request,)
    return (request, type(like), like.shape, like.dtype) if is_device_array(like) else None
