"""Registers algorithms for the time of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from collectives.algorithms.registry import REGISTRY


@contextmanager
def registry_as_it_was() -> Iterator[None]:
    """Remove the algorithms that are registered in the `with` block when it ends."""
    before = {collective: dict(entries) for collective, entries in REGISTRY.items()}
    try:
        yield
    finally:
        for collective, entries in before.items():
            REGISTRY[collective].clear()
            REGISTRY[collective].update(entries)
