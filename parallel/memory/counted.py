"""What a rank keeps in memory: counted from the arrays that are alive, and predicted by formula."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from parallel.nn import Array

CATEGORIES = ("parameters", "gradients", "optimizer", "master", "activations", "buffers")


class Memory:
    """Counts arrays, from when they are shown to it until nobody holds them any longer.

    `now` and `peak` are bytes by category; `most` is the greatest sum at one moment.
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.most = 0
        self._seen: dict[int, weakref.finalize[Any, Any]] = {}
        self._lock = threading.RLock()  # an array may die in any thread, and inside `count` too

    def count(self, category: str, held: Any) -> Any:
        """Count the arrays in `held`, an array or lists of such; returns `held`.

        Views count as the memory they look at, once.  Tokens, which are int64, are data: not
        counted.
        """
        for array in arrays_in(held):
            self._count(category, owner_of(array))
        return held

    def _count(self, category: str, owner: Array) -> None:
        with self._lock:
            if id(owner) in self._seen:
                return
            nbytes = int(owner.nbytes)
            self._seen[id(owner)] = weakref.finalize(owner, self._gone, category, id(owner), nbytes)
            self.now[category] += nbytes
            self.peak[category] = max(self.peak[category], self.now[category])
            self.most = max(self.most, sum(self.now.values()))

    def _gone(self, category: str, key: int, nbytes: int) -> None:
        with self._lock:
            del self._seen[key]
            self.now[category] -= nbytes


def arrays_in(held: Any) -> Iterable[Array]:
    """The arrays in nested lists, tuples and mappings, but those of int64."""
    if isinstance(held, Mapping):
        held = held.values()
    if isinstance(held, Iterable) and not hasattr(held, "dtype"):
        for item in held:
            yield from arrays_in(item)
    elif hasattr(held, "dtype") and held.dtype != np.int64:
        yield held


def owner_of(array: Array) -> Array:
    """The array whose memory a view looks at."""
    while hasattr(getattr(array, "base", None), "nbytes"):
        array = array.base
    return array
