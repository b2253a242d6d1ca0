"""Host memory of large arrays, which is reused when no array needs it any more.

The system hands out new memory page by page, and clears each page first.  For an array of a few MiB
that takes as long as sending it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import operator
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Bytes = NDArray[np.uint8]

LARGE = 2**18  # bytes of an array whose memory is kept here; the C library keeps smaller ones
_HUGE_PAGE = 2**21  # bytes


class CachingAllocator:
    """Makes arrays, and keeps their memory when they are gone, for later arrays.

    Parameters
    ----------
    max_bytes : int
        The most bytes that it keeps and that no array uses, those that were given back last.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        # One for each power of two, oldest first, each with when it came back.  Threads use them at
        # the same time, and so do arrays that the garbage collector deletes in the middle of a
        # function here: so they are only appended to and popped, which is atomic.
        self._idle: list[deque[tuple[int, Bytes]]] = [
            deque() for _ in range(max_bytes.bit_length())
        ]
        self._times = itertools.count()

    @property
    def num_idle_bytes(self) -> int:
        """The bytes that are kept and that no array uses."""
        return sum(len(idle) << bits for bits, idle in enumerate(self._idle))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a new array, C-ordered, with arbitrary contents."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < LARGE or dtype.hasobject or min(shape) < 0:
            return np.empty(shape, dtype)
        memory = np.asarray(_Loan(self, self._take(num_bytes), num_bytes))
        return memory.view(dtype).reshape(shape)

    def _take(self, num_bytes: int) -> Bytes:
        """Return memory for `num_bytes` bytes.

        Its size is rounded up to a power of two, so that others fit too.
        """
        bits = (num_bytes - 1).bit_length()
        try:
            return self._idle[bits].pop()[1]
        except IndexError:
            return _new_memory(1 << bits)

    def give(self, memory: Bytes) -> None:
        """Keep memory that no array uses any more."""
        if memory.size > self.max_bytes:
            return
        self._idle[memory.size.bit_length() - 1].append((next(self._times), memory))
        while self.num_idle_bytes > self.max_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        with contextlib.suppress(IndexError, ValueError):  # taken in the meantime
            min((idle for idle in self._idle if idle), key=lambda idle: idle[0][0]).popleft()


class _Loan:
    """Memory in use: the base of an array and of all its views, so it goes when they are gone.

    The views see `num_bytes` bytes of it: an array's base is as large as the array that was made.
    """

    def __init__(self, allocator: CachingAllocator, memory: Bytes, num_bytes: int) -> None:
        self._allocator, self._memory = allocator, memory
        self.__array_interface__ = memory.__array_interface__ | {"shape": (num_bytes,)}

    def __del__(self) -> None:
        self._allocator.give(self._memory)


def _new_memory(size: int) -> Bytes:
    """Return memory of the system, in huge pages if it has them, which are faster to find."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


_allocator = CachingAllocator(max_bytes=2**28)


def empty(shape: int | Sequence[int], dtype: DTypeLike = np.float64) -> NDArray[Any]:
    """Return a new array in host memory, C-ordered, with arbitrary contents, as `numpy.empty` does.

    The memory of an array of 256 KiB or more is kept when the array and all its views are gone, for
    later arrays of about that size.  New memory would be cleared by the system, page by page, which
    takes about as long as sending it.  At most 256 MiB are kept that no array uses.  Results of
    collectives on NumPy arrays are made by this function.

    Parameters
    ----------
    shape : int or sequence of int
    dtype : dtype
        The dtype of the elements.

    Examples
    --------
    >>> import collectives
    >>> import numpy as np
    >>> rows = collectives.empty((4096, 1024), np.float32)
    >>> rows.shape, rows.dtype
    ((4096, 1024), dtype('float32'))
    """
    sizes = shape if isinstance(shape, Sequence) else (shape,)
    return _allocator.empty(tuple(map(operator.index, sizes)), np.dtype(dtype))
