"""How a function is called that may hang or fail on some ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Attempt: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Calls a function and returns what that does, or None on all ranks if it fails on any."""


def called(function: Callable[[], Any]) -> Any:
    """Return what a function does that neither hangs nor fails."""
    return function()
