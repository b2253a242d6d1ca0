"""Lets threads take turns so often that a race between them shows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def switching_every(seconds: float) -> Iterator[None]:
    """Let another thread have its turn after so many seconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
