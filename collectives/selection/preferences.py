"""The preferred algorithms of calls that name none: `collectives.using`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from collectives.selection.labels import parse_label

# Pairs (collective, label), the innermost first.
_preferred: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("preferred", default=())
preferences = _preferred.get  # returns all pairs, hashable


@contextmanager
def using(**algorithms: str) -> Iterator[None]:
    """Choose the algorithms of calls inside a `with` block that name none.

        with collectives.using(all_reduce="ring", broadcast="pipeline(segments=8)"):
            ...

    `algorithms`: for each collective, an algorithm as a call names it.  All ranks use the same.  Of
    nested blocks the inner one counts.  The choice belongs to the thread (or task) that makes it;
    what the library sends for itself is not affected.

    Returns a context manager.  Raises ValueError for an unknown collective or algorithm.  If an
    algorithm cannot serve a call, that call raises ValueError, as if it had named it.
    """
    labels = [
        (collective, parse_label(collective, text).label) for collective, text in algorithms.items()
    ]
    token = _preferred.set((*labels, *_preferred.get()))
    try:
        yield
    finally:
        _preferred.reset(token)


def preferred(collective: str) -> str | None:
    """The preferred algorithm of calls that name none; None: choose."""
    return next((label for name, label in _preferred.get() if name == collective), None)
