"""The calls and plans of a communicator that are ready to run again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from collectives.algorithms.registry import watch

_MOST_CALLS = 512
_MOST_BYTES = 32 * 2**20

MISFIT = object()  # what a cached call answers if the arrays are not such as it can serve

# `Cached.make` of one: Python calls a method in less time than an object.
Make = Callable[[Any, Any, "float | None"], Any]


class ReadyCall(Protocol):
    """A call that is ready to run on arrays that fit.  `num_bytes`: the memory that it takes."""

    num_bytes: int

    @property
    def make(self) -> Make:
        """Make the call; MISFIT if the arrays are others, and nothing has been done."""


class CallCache:
    """Ready calls by their keys; boundedly many.

    A key is a pair: the request, which is the collective and all arguments but the arrays, and the
    shape and dtype of the arrays.  `latest`: for each request, the call that was made last.
    """

    def __init__(self) -> None:
        self.latest: dict[Hashable, Make] = {}
        self._calls: dict[Hashable, Make] = {}
        self._num_bytes = 0
        watch(self)

    def __len__(self) -> int:
        return len(self._calls)

    def find(self, key: tuple[Any, ...]) -> Make | None:
        """How to make the call of this key, if it was made before; it is the latest now."""
        found = self._calls.get(key)
        if found is not None:
            self.latest[key[0]] = found
        return found

    def add(self, key: tuple[Any, ...], call: ReadyCall) -> None:
        """Keep a call; if there are too many, forget all others first."""
        if len(self) >= _MOST_CALLS or self._num_bytes + call.num_bytes > _MOST_BYTES:
            self.forget()
        self._calls[key] = self.latest[key[0]] = call.make
        self._num_bytes += call.num_bytes

    def forget(self) -> None:
        """Forget all of them, as when an algorithm is registered under a name again."""
        self._calls.clear()
        self.latest.clear()
        self._num_bytes = 0


NO_CALLS = CallCache()
