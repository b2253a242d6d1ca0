"""Blocking calls that come again go straight to a plan that was kept.

Making a plan takes longer than running a small one.  So a small call that comes a second time
leaves its plan behind, bound to arrays of the library's own; the next one like it, whatever its
arrays, copies into that plan's input and out of its result.  A larger one that comes a second time
with its arrays at the same addresses is bound to that memory.  No array of a caller's is kept
alive: a plan touches memory only while it runs, and it runs for arrays that lie there.
"""

from __future__ import annotations

from collections.abc import Hashable
from ctypes import addressof, c_char
from functools import partial

import numpy as np

from collectives.arrays import Array
from collectives.errors import CollectiveTimeout
from collectives.plan import Plan
from collectives.work import Work

# Up to so many bytes of x and out copying is quicker than looking where they lie; and up to so many
# of x where the result is a new array, which lies elsewhere every time.
COPIED_BYTES = 16 * 1024
COPIED_RESULT_BYTES = 256 * 1024
_MOST_CALLS = 256
_MOST_BYTES = 32 * 2**20
_MOST_SEEN = 1024
_MOST_REFUSED = 4096


class KeptCall:
    """A plan for calls that look alike.

    `x`, `y`: arrays of its own to copy from and to, or None where there is nothing to copy.
    `has_result`: whether this rank gets a result.
    """

    def __init__(self, plan: Plan, x: Array | None, y: Array | None, *, has_result: bool) -> None:
        self.plan, self.x, self.y, self.has_result = plan, x, y, has_result
        own = sum(array.nbytes for array in (x, y) if array is not None)
        self.num_bytes = plan.num_bytes + own

    def __call__(self, x: Array | None, out: Array | None, timeout: float | None) -> Array | None:
        """Run on the caller's arrays; without `out` the result is a new one.

        After CollectiveTimeout the error's `work` keeps the arrays, and brings the result to its
        place.
        """
        if self.x is not None:
            self.x[...] = x
        try:
            self.plan.run(timeout)
        except CollectiveTimeout as error:
            error.work = Work(self.plan, partial(self._result, x, out))
            raise
        return self._result(x, out)

    def _result(self, x: Array | None, out: Array | None) -> Array | None:
        if not self.has_result:
            return None
        if self.y is None:
            return out
        if out is None:
            return self.y.copy()
        out[...] = self.y
        return out


class GuardedCall(KeptCall):
    """The same in checked mode, where it matters whether the caller's arrays are one."""

    def __call__(self, x: Array | None, out: Array | None, timeout: float | None) -> Array | None:
        guard, has_copies = self.plan.guard, self.x is not None and self.y is not None
        if guard is not None and has_copies:
            is_read_there = x is not None and x.flags.c_contiguous  # and not from a copy
            shares = out is not None and is_read_there and np.may_share_memory(x, out)
            guard.in_place(shares)
        return super().__call__(x, out, timeout)


class Remembered:
    """The calls of a communicator by what they look like, boundedly many."""

    def __init__(self) -> None:
        self.calls: dict[Hashable, KeptCall] = {}
        self._num_bytes = 0
        self._seen: set[Hashable] = set()
        self._num_refused = 0

    def wants(self, look: Hashable) -> bool:
        """Whether to remember a call that looks like this: it came before, and there is room.

        Those that are remembered stay until many others have found no room.  If they made it for
        every newcomer, a program that goes round among too many calls would find none of them.
        """
        if look not in self._seen:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen.add(look)
            return False
        if len(self.calls) >= _MOST_CALLS:
            self._num_refused += 1
            if self._num_refused < _MOST_REFUSED:
                return False
            self.forget()
        return True

    def add(self, look: Hashable, call: KeptCall) -> None:
        """Remember a call; when they take too much memory, forget all others first."""
        self._num_bytes += call.num_bytes
        if self._num_bytes > _MOST_BYTES:
            self.forget()
            self._num_bytes = call.num_bytes
        self.calls[look] = call

    def drop(self, plan: Plan) -> None:
        """Leave a plan to whoever waits for it."""
        for look in [look for look, call in self.calls.items() if call.plan is plan]:
            self._num_bytes -= self.calls.pop(look).num_bytes

    def forget(self) -> None:
        """Forget all of them."""
        for call in self.calls.values():
            call.plan.free()
        self.calls.clear()
        self._num_bytes = self._num_refused = 0


def places(x: Array | None, out: Array | None) -> tuple[int | None, int | None]:
    """The addresses of NumPy arrays."""
    return _address(x), _address(out)


def _address(x: Array | None) -> int | None:
    if x is None:
        return None
    try:
        return addressof(c_char.from_buffer(x))
    except (BufferError, TypeError, ValueError):  # read-only, empty, or a dtype unknown to buffers
        return int(x.__array_interface__["data"][0])  # which takes four times as long


class _Memory:
    """Bytes at an address, as NumPy asks for them.  It owns nothing and keeps nothing alive."""

    def __init__(self, address: int | None, num_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
        }


def borrowed(x: Array | None) -> Array | None:
    """The memory of a contiguous array, without a reference to the array."""
    if x is None:
        return None
    memory = np.asarray(_Memory(_address(x), x.nbytes))
    return memory.view(x.dtype).reshape(x.shape)
