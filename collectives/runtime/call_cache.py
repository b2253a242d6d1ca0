"""The cache of calls and plans that are ready to run again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from collectives.algorithms import registry

_MAX_CALLS = 512
_MAX_BYTES = 32 * 2**20
_MAX_SEEN = 4096

MISFIT = object()  # the result of a cached call whose arrays do not fit

# The bound method `Cached.make`, which Python calls faster than an object.
Make = Callable[[Any, Any, "float | None"], Any]


class ReadyCall(Protocol):
    """A call that is ready to run on arrays that fit.  `num_bytes`: its memory."""

    num_bytes: int

    @property
    def make(self) -> Make:
        """Make the call; return MISFIT, without any effect, if the arrays do not fit."""


class CallCache:
    """A bounded number of ready calls, by their keys.

    A key is a tuple: the request, which is the collective with all arguments except the arrays, and
    the shape and dtype of the arrays.  `latest`: the latest call of each request.
    """

    def __init__(self) -> None:
        self.latest: dict[Hashable, Make] = {}
        self._calls: dict[Hashable, Make] = {}
        self._num_bytes = 0
        self._seen: set[int] = set()
        registry.watch(self)

    def __len__(self) -> int:
        return len(self._calls)

    def find(self, key: tuple[Any, ...]) -> Make | None:
        """The function that makes the call of this key, or None; it becomes the latest."""
        found = self._calls.get(key)
        if found is not None:
            self.latest[key[0]] = found
        return found

    def is_repeated(self, key: tuple[Any, ...]) -> bool:
        """Whether this was asked for the same key before, as far as it is remembered.

        Calls with counts that may never come again are kept the second time.
        """
        number = hash(key)
        if number in self._seen:
            return True
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen.add(number)
        return False

    def add(self, key: tuple[Any, ...], call: ReadyCall) -> None:
        """Add a call; if the cache is full, forget all others first."""
        if len(self) >= _MAX_CALLS or self._num_bytes + call.num_bytes > _MAX_BYTES:
            self.forget()
        if key not in self._calls:
            self._num_bytes += call.num_bytes
        self._calls[key] = self.latest[key[0]] = call.make

    def forget(self) -> None:
        """Forget all calls, for example when an algorithm is registered again."""
        self._calls.clear()
        self.latest.clear()
        self._num_bytes = 0


NO_CALLS = CallCache()
