"""The options that calls share, as type checkers see them: `async_op` says what is returned."""

from __future__ import annotations

from typing import Generic, Literal, Required, TypedDict, TypeVar

A = TypeVar("A")  # an array


class Waits(TypedDict, total=False):
    """Options of a call that returns when it is complete."""

    async_op: Literal[False]
    timeout: float | None


class Starts(TypedDict, total=False):
    """Options of a call that returns a `Work`."""

    async_op: Required[Literal[True]]
    timeout: float | None


class Blocking(Waits, Generic[A], total=False):
    """Options of a collective that returns its result."""

    out: A | None
    algorithm: str | None


class Async(Starts, Generic[A], total=False):
    """Options of a collective that returns a `Work`."""

    out: A | None
    algorithm: str | None
