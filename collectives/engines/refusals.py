"""Errors with which all ranks of a communicator refuse a call, before anything of it is sent."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from collectives.errors import CollectiveError


def _nothing() -> None:
    """What a reference to no error returns."""


class Refusals:
    """Notes the last such error of a communicator, which can be used after it.

    It holds only a reference, because the frames of an error hold arrays.
    """

    def __init__(self) -> None:
        self._last: Callable[[], CollectiveError | None] = _nothing

    def noted(self, error: CollectiveError) -> CollectiveError:
        """The error, noted as one that all ranks raise."""
        self._last = ref(error)
        return error

    def has(self, error: BaseException) -> bool:
        """Whether this is the last error that was noted."""
        return self._last() is error
