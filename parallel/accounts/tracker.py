"""Track the memory of arrays while they are alive."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

Array: TypeAlias = Any
T = TypeVar("T")

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "master",
    "activations",
    "buffers",
    "scratch",
    "messages",
)
TOKENS = np.dtype(np.int64)


class MemoryTracker:
    """Counts the bytes of arrays, from the call of `track` until they are freed.

    ``now`` and ``peak`` have the bytes that are alive, and the most so far, by category.

    Examples
    --------
    >>> import numpy as np
    >>> from parallel import MemoryTracker
    >>> memory = MemoryTracker()
    >>> x = memory.track("buffers", np.zeros(10))
    >>> del x
    >>> memory.now["buffers"], memory.peak["buffers"]
    (0, 80)
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._tracked: dict[int, weakref.ref[Any]] = {}
        self._lock = threading.RLock()  # an array may be freed in any thread, also in `track`

    def track(self, category: str, held: T) -> T:
        """Count the arrays in `held`, an array or nested containers, in `category`; return `held`.

        A view counts as the array it views, once, because it keeps the whole array alive.  An
        array has the bytes of its elements, even if an allocator keeps more for it.  Arrays of
        int64 are tokens and do not count.
        """
        with self._lock:
            for owner in map(owner_of, arrays_in(held)):
                if (key := id(owner)) not in self._tracked:
                    nbytes = int(owner.nbytes)
                    freed = partial(self._freed, category, key, nbytes)
                    self._tracked[key] = weakref.ref(owner, freed)
                    self.add(category, nbytes)
        return held

    def add(self, category: str, nbytes: int) -> None:
        """Count `nbytes` more, or fewer, in `category`."""
        with self._lock:
            self.now[category] += nbytes
            self.peak[category] = max(self.peak[category], self.now[category])

    def _freed(self, category: str, key: int, nbytes: int, _: object) -> None:
        with self._lock:
            del self._tracked[key]
            self.add(category, -nbytes)


def arrays_in(held: Any) -> list[Array]:
    """Return the arrays in nested lists, tuples and dicts, except arrays of int64."""
    arrays, items = [], [held]
    for item in items:  # which grow meanwhile
        if hasattr(item, "dtype"):
            if item.dtype != TOKENS:
                arrays.append(item)
        elif isinstance(item, dict):
            items.extend(item.values())
        elif isinstance(item, list | tuple):
            items.extend(item)
    return arrays


def owner_of(array: Array) -> Array:
    """Return the array whose memory a view uses."""
    while hasattr(base := getattr(array, "base", None), "nbytes"):
        array = base
    return array
