"""Reads mpi4py's buffer specifications as mpi4py does.

A message of one block is `buf`, `[buf, count]`, `[buf, datatype]`, `[buf, count, datatype]`,
`[buf, (count, displ)]`, `[buf, (count, displ), datatype]` or `[buf, count, displ, datatype]`.  A
message with a block for each rank has sequences in place of the numbers.  A message with a datatype
for each rank is `[buf, types]`, `[buf, (counts, displs), types]` or `[buf, counts, displs, types]`.
`datatype` may be a type code such as "d".  Missing values are inferred; if that is not possible,
the error is the same as in mpi4py.  Unlike in mpi4py, a message that exceeds its buffer is refused.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.schedule import even_counts

_FOREIGN_ORDER = ">" if sys.byteorder == "little" else "<"
_DLPACK_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_HOST_MEMORY = (1, 3, 11, 13)  # of DLPack's devices: the host's own, page-locked, or managed


class Part(NamedTuple):
    """Consecutive elements; the first has the offset `offset`, in bytes, in the memory."""

    offset: int
    num_elements: int
    datatype: MPI.Datatype


class Message(NamedTuple):
    """The memory of a specification and its parts.

    Without memory (MPI.BOTTOM, None) offsets are absolute addresses.
    """

    memory: MPI.buffer | None
    parts: tuple[Part, ...]

    @property
    def datatype(self) -> MPI.Datatype:
        """The datatype of a message of one block."""
        return self.parts[0].datatype

    @property
    def num_elements(self) -> int:
        """The number of elements of a message of one block."""
        return self.parts[0].num_elements

    def only(self, number: int) -> Message:
        """Return a message of one of the parts."""
        return Message(self.memory, (self.parts[number],))

    def resized(self, num_elements: int) -> Message:
        """Return a message of one block, with another number of elements."""
        offset, _, datatype = self.parts[0]
        return Message(self.memory, (Part(offset, num_elements, datatype),))

    def repeated(self, number: int) -> Message:
        """Return a message of one block, repeated `number` times."""
        offset, count, datatype = self.parts[0]
        stride = count * datatype.extent if count else 0
        parts = [Part(offset + i * stride, count, datatype) for i in range(number)]
        return Message(self.memory, tuple(parts))


def one_block(spec: Any, *, is_sent: bool, num_blocks: int = 0) -> Message:
    """Return a message of one block, or the first of `num_blocks` blocks of equal length."""
    buf, count, displ, datatype = _fields(spec, is_vector=False)
    memory, datatype = _memory_and_type(buf, datatype, is_sent)
    length = 0 if memory is None else memory.nbytes
    offset = 0
    if displ is not None:
        offset = _displaced(operator.index(displ), datatype, length)
    if count is None:
        number = _inferred(length - offset, datatype, max(num_blocks, 1))
    else:
        number = operator.index(count)
        if number < 0:
            raise ValueError(f"message: negative count {number}")
        if number > 0 and buf is None:
            raise ValueError(f"message: buffer is None but count is {number}")
    return Message(memory, (Part(offset, number, datatype),))


def one_block_per_rank(spec: Any, num_blocks: int, *, is_sent: bool) -> Message:
    """Return a message with a block for each rank, with its own count and displacement."""
    buf, counts, displs, datatype = _fields(spec, is_vector=True)
    memory, datatype = _memory_and_type(buf, datatype, is_sent)
    if counts is None:
        total = _inferred(0 if memory is None else memory.nbytes, datatype, 1)
        numbers = [*even_counts(total, num_blocks)]
    elif _is_integral(counts):
        numbers = [operator.index(counts)] * num_blocks
    else:
        numbers = _integers(counts, num_blocks)
    if min(numbers) < 0:
        raise ValueError(f"message: negative count {min(numbers)}")
    if displs is None:
        starts = [sum(numbers[:i]) for i in range(num_blocks)]
    elif _is_integral(displs):
        starts = [operator.index(displs) * i for i in range(num_blocks)]
    else:
        starts = _integers(displs, num_blocks)
    extent = datatype.extent if datatype else 1
    parts = (Part(start * extent, n, datatype) for start, n in zip(starts, numbers, strict=True))
    return Message(memory, tuple(parts))


def one_type_per_rank(spec: Any, num_blocks: int, *, is_sent: bool) -> Message:
    """Return a message with a block for each rank, with its own datatype and offset in bytes."""
    if len(spec) not in (2, 3, 4):
        raise ValueError("message: expecting 2 to 4 items")
    counts = displs = None
    if len(spec) == 2:
        buf, types = spec
    elif len(spec) == 3:
        buf, (counts, displs), types = spec
    else:
        buf, counts, displs, types = spec
    if _is_bottom(buf) and counts is None:
        raise ValueError("message: BOTTOM requires counts")
    if _is_bottom(buf) and displs is None:
        raise ValueError("message: BOTTOM requires displs")
    memory = None if _is_bottom(buf) else _memory(buf, is_sent)
    numbers, starts = [1] * num_blocks, [0] * num_blocks
    if counts is not None or displs is not None:
        numbers, starts = _integers(counts, num_blocks), _integers(displs, num_blocks)
    if min(numbers) < 0:
        raise ValueError(f"message: negative count {min(numbers)}")
    _expect(num_blocks, types)
    for datatype in types:
        if not isinstance(datatype, MPI.Datatype):
            raise TypeError(f"Expected mpi4py.MPI.Datatype, got {type(datatype).__name__}")
    return Message(memory, tuple(map(Part, starts, numbers, types)))


def is_in_place(spec: Any) -> bool:
    """Return whether the specification stands for the other buffer of the call."""
    return spec is None or spec is MPI.IN_PLACE


def _fields(spec: Any, *, is_vector: bool) -> tuple[Any, Any, Any, Any]:
    """Return the buffer, count(s), displacement(s) and datatype, each None if it is missing."""
    if not isinstance(spec, (list, tuple)):
        if not (isinstance(spec, np.ndarray) or _is_buffer(spec)):
            raise TypeError("message: expecting buffer or list/tuple")
        return spec, None, None, None
    displ = datatype = None
    if len(spec) == 2:
        buf, count = spec
        if isinstance(count, (MPI.Datatype, str)):
            count, datatype = None, count
    elif len(spec) == 3:
        buf, count, datatype = spec
    elif len(spec) == 4:
        return tuple(spec)
    else:
        raise ValueError("message: expecting 2 to 4 items")
    # A list of two is the counts of two ranks, or a count and a displacement.
    if isinstance(count, tuple) or (isinstance(count, list) and not is_vector):
        count, displ = count
    return buf, count, displ, datatype


def _is_buffer(x: Any) -> bool:
    if hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__"):
        return True
    try:
        memoryview(x)
    except TypeError:
        return False
    except (BufferError, ValueError):  # a memoryview cannot describe this buffer
        return True
    return True


def _is_bottom(x: Any) -> bool:
    return x is None or x is MPI.BOTTOM


def _is_integral(x: Any) -> bool:
    try:
        operator.index(x)
    except TypeError:
        return False
    return True


def _integers(numbers: Any, size: int) -> list[int]:
    _expect(size, numbers)
    return [operator.index(number) for number in numbers]


def _expect(size: int, items: Sequence[Any]) -> None:
    if len(items) != size:
        raise ValueError(f"expecting {size} items, got {len(items)}")


def _displaced(displ: int, datatype: MPI.Datatype, length: int) -> int:
    """Return the displacement in bytes."""
    if displ < 0:
        raise ValueError(f"message: negative displacement {displ}")
    if displ == 0:
        return 0
    extent = _extent(datatype, "handle displacement")
    if displ * extent > length:
        raise ValueError(
            f"message: displacement {displ} out of bounds, "
            f"number of datatype entries {length // extent}"
        )
    return displ * extent


def _inferred(length: int, datatype: MPI.Datatype, num_blocks: int) -> int:
    """Return the number of elements of each of `num_blocks` blocks that fill `length` bytes."""
    if length <= 0:
        return 0
    extent = _extent(datatype, "infer count")
    number, rest = divmod(length, extent)
    if rest:
        lower = datatype.lb
        raise ValueError(
            f"message: cannot infer count, buffer length {length} is not a multiple of "
            f"datatype extent {extent} (lb:{lower}, ub:{lower + extent})"
        )
    if number % num_blocks:
        raise ValueError(
            f"message: cannot infer count, number of entries {number} is not a multiple of "
            f"required number of blocks {num_blocks}"
        )
    return number // num_blocks


def _extent(datatype: MPI.Datatype, what: str) -> int:
    """Return the extent in bytes.

    Raises ValueError, which says `what` needs the extent, if the extent is not positive.
    """
    if not datatype:
        raise ValueError(f"message: cannot {what}, datatype is null")
    lower, extent = datatype.Get_extent()
    if extent <= 0:
        raise ValueError(
            f"message: cannot {what}, datatype extent {extent} (lb:{lower}, ub:{lower + extent})"
        )
    return extent


def _memory_and_type(
    buf: Any, datatype: Any, is_sent: bool
) -> tuple[MPI.buffer | None, MPI.Datatype]:
    if _is_bottom(buf):
        return None, _as_datatype(datatype)
    memory = _memory(buf, is_sent)
    return memory, _format(buf) if datatype is None else _as_datatype(datatype)


def _memory(buf: Any, is_sent: bool) -> MPI.buffer:
    """Return the memory of a buffer, a DLPack tensor or a CUDA array interface.

    Arrays in host memory may have the latter two as well.
    """
    if isinstance(buf, np.ndarray):
        if not buf.flags.c_contiguous and buf.flags.f_contiguous:
            buf = buf.T
    elif hasattr(buf, "__dlpack_device__") and buf.__dlpack_device__()[0] not in _HOST_MEMORY:
        raise TypeError(
            f"a {type(buf).__name__} in device memory; collectives.wrap(comm) serves CuPy arrays"
        )
    return MPI.buffer.frombuffer(buf, is_sent)


def _as_datatype(datatype: Any) -> MPI.Datatype:
    if isinstance(datatype, MPI.Datatype):
        return datatype
    try:
        return _of_code(datatype)
    except (TypeError, ValueError):
        raise KeyError(f"cannot map {datatype!r} to MPI datatype") from None


_of_code = cache(MPI.Datatype.fromcode)


def _format(buf: Any) -> MPI.Datatype:
    """Return the datatype of a buffer, from its own type code."""
    code = _code(buf)
    if code[:1] == _FOREIGN_ORDER:
        raise BufferError(f"format string {code!r} with non-native byte order")
    return _as_datatype(code.lstrip("@<>"))


def _code(buf: Any) -> str:
    """Return the type code of a buffer, from the first of three protocols that has one."""
    try:
        return memoryview(buf).format
    except (BufferError, TypeError, ValueError) as error:
        if hasattr(buf, "__dlpack__") and not isinstance(buf, np.ndarray):
            return _dlpack_code(buf.__dlpack__())
        if hasattr(buf, "__cuda_array_interface__"):
            order, kind, *size = buf.__cuda_array_interface__["typestr"]
            code = _numpy_code(kind, int("".join(size)))
            return order + code if order == _FOREIGN_ORDER else code
        raise BufferError(str(error)) from None


def _dlpack_code(capsule: object) -> str:
    """Return the type code in a DLPack capsule; NumPy does not know all of them."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    pointer = pointer_of(capsule, b"dltensor")
    # After the address, the device (two integers) and the number of dimensions.
    kind, num_bits, lanes, more_lanes = (ctypes.c_uint8 * 4).from_address(pointer + 20)
    if (lanes, more_lanes) == (2, 0) and _DLPACK_KINDS.get(kind) == "f":
        return _numpy_code("c", 2 * num_bits // 8)
    is_one = (lanes, more_lanes) == (1, 0)
    return _numpy_code(_DLPACK_KINDS.get(kind, "V") if is_one else "V", num_bits // 8)


def _numpy_code(kind: str, num_bytes: int) -> str:
    """Return the type code of a kind of numbers; for an unknown kind, the type code of bytes."""
    return np.dtype(f"{kind}{num_bytes}").char if kind in "biufc" else "B"
