"""Small calls that come again: their plans are kept, on arrays of the library's own.

Making a plan takes longer than running a small one.  So a small blocking call leaves its plan
behind, and the next one like it, whatever its arrays, copies into that plan's input and out of its
result.  No array of a caller's is ever kept.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from collectives.arrays import Array
from collectives.errors import CollectiveTimeout
from collectives.plan import Plan, Work

SMALL_BYTES = 256 * 1024  # n of the formulas; on all ranks alike, it decides by which tag calls go
_MOST_CALLS = 256
_MOST_BYTES = 32 * 2**20


class SmallCall:
    """A plan on arrays of its own, `x` and `y` (None: this rank has no input, or no result)."""

    def __init__(self, plan: Plan, x: Array | None, y: Array | None) -> None:
        self.plan, self.x, self.y = plan, x, y
        self.num_bytes = sum(array.nbytes for array in (x, y) if array is not None)

    def __call__(self, x: Array | None, out: Array | None, timeout: float | None) -> Array | None:
        """Run on the caller's arrays; without `out` the result is a new one.

        After CollectiveTimeout the result is brought where it belongs by the error's `work`.
        """
        if self.x is not None:
            self.x[...] = x
        try:
            self.plan.run(timeout)
        except CollectiveTimeout as error:
            error.work = Work(self.plan, partial(self._result, out))
            raise
        return self._result(out)

    def _result(self, out: Array | None) -> Array | None:
        if self.y is None:
            return None
        if out is None:
            return self.y.copy()
        out[...] = self.y
        return out


class Remembered:
    """The small calls of a communicator by what their arguments look like, boundedly many."""

    def __init__(self) -> None:
        self.calls: dict[Hashable, SmallCall] = {}
        self._num_bytes = 0

    def add(self, signature: Hashable, call: SmallCall) -> None:
        """Remember a call; when there are too many, forget all others first."""
        self._num_bytes += call.num_bytes
        if len(self.calls) >= _MOST_CALLS or self._num_bytes > _MOST_BYTES:
            self.forget()
            self._num_bytes = call.num_bytes
        self.calls[signature] = call

    def drop(self, plan: Plan) -> None:
        """Leave a plan to whoever waits for it."""
        self.calls = {look: call for look, call in self.calls.items() if call.plan is not plan}

    def forget(self) -> None:
        """Forget all of them."""
        for call in self.calls.values():
            call.plan.free()
        self.calls.clear()
        self._num_bytes = 0
