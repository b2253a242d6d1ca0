"""MPI's operations as operators of the library.

Where one of ours does the same on this datatype it is taken; the others, and those that users
make, are applied by `MPI.Op.Reduce_local`, which sends nothing.  Where MPI leaves open what the
smaller or larger one is, with NaN, it is NaN here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.arrays import OPERATORS, Array, Backend, Operator
from collectives.engines import Action
from collectives.mpi4py_compat.memory import Bytes, Whole, is_plain

OPERATIONS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "and": MPI.BAND,
    "or": MPI.BOR,
    "xor": MPI.BXOR,
}
_NAMES = {op.handle: name for name, op in OPERATIONS.items()}
_NUMBERS = """
    SIGNED_CHAR SHORT INT LONG LONG_LONG INT8_T INT16_T INT32_T INT64_T
    UNSIGNED_CHAR UNSIGNED_SHORT UNSIGNED UNSIGNED_LONG UNSIGNED_LONG_LONG
    UINT8_T UINT16_T UINT32_T UINT64_T AINT OFFSET COUNT
    FLOAT DOUBLE LONG_DOUBLE C_FLOAT_COMPLEX C_DOUBLE_COMPLEX C_LONG_DOUBLE_COMPLEX
    INTEGER REAL DOUBLE_PRECISION COMPLEX DOUBLE_COMPLEX
    INTEGER1 INTEGER2 INTEGER4 INTEGER8 REAL4 REAL8 COMPLEX8 COMPLEX16
"""
_DTYPES = {
    datatype.handle: np.dtype(datatype.typestr)
    for datatype in (getattr(MPI, name) for name in _NUMBERS.split())
    if datatype and datatype.typestr
}


# What stands for one of MPI's operations among the arguments of the library's own call, by the
# dtype that it combines and its identity.
PLAIN_OPERATORS: dict[tuple[np.dtype[Any], int], dict[str, str]] = {
    (np.dtype(char), id(op)): {} if name == "sum" else {"op": name}
    for char in "bBhHiIlLqQfdFD"  # which MPI knows as NumPy does
    for name, op in OPERATIONS.items()
    if np.dtype(char).kind in (OPERATORS[name].kinds or "")
}


class Combining(NamedTuple):
    """How a reduction combines: on elements of which dtype, and with what."""

    dtype: np.dtype[Any]
    operator: str | Operator
    release: tuple[Action, ...] = ()


def combining(op: MPI.Op, datatype: MPI.Datatype) -> Combining:
    """What stands for an MPI operation on this datatype.

    Raises MPI.Exception, as MPI does, for one that has no meaning for it.
    """
    if not isinstance(op, MPI.Op):
        raise TypeError(
            f"Argument 'op' has incorrect type (expected mpi4py.MPI.Op, got {type(op).__name__})"
        )
    dtype, name = _DTYPES.get(datatype.handle), _NAMES.get(op.handle)
    if name is not None and dtype is not None and _serves(OPERATORS[name], dtype):
        return Combining(dtype, name)
    if not op or op in (MPI.REPLACE, MPI.NO_OP):
        raise MPI.Exception(MPI.ERR_OP)
    if not datatype or not datatype.size:
        raise MPI.Exception(MPI.ERR_TYPE)
    if datatype.extent < 0:
        raise NotImplementedError("a reduction of a datatype whose elements lie backwards")
    dtype = np.dtype((np.void, datatype.size))
    if is_plain(datatype):
        local = Local(op, datatype)
        return Combining(dtype, MpiOperator.of(op, local))
    if datatype.is_predefined:
        unpacking = Unpacking(op, datatype, datatype)
        return Combining(dtype, MpiOperator.of(op, unpacking), (unpacking.free,))
    kept = datatype.Dup()
    unpacking = Unpacking(op, datatype, kept)
    return Combining(dtype, MpiOperator.of(op, unpacking), (unpacking.free, kept.Free))


def _serves(operator: Operator, dtype: np.dtype[Any]) -> bool:
    try:
        operator.check(dtype)
    except TypeError:
        return False
    return True


class MpiOperator(Operator):
    """An operator that is an MPI operation."""

    @classmethod
    def of(cls, op: MPI.Op, function: Local | Unpacking) -> MpiOperator:
        """`function` applies it to arrays of packed elements."""
        name = "an MPI operation" if op.is_predefined else "a user's MPI operation"
        return cls(name, function, is_commutative=op.Is_commutative())

    def rehearse(self, backend: Backend, x: Array) -> None:
        """Try MPI's own only: what a user's function does besides combining is not ours to do."""
        if isinstance(self.function, (Local, Unpacking)) and self.function.op.is_predefined:
            super().rehearse(backend, x)


class Local:
    """An operation on elements that are so many bytes in a row.  What MPI calls `in` is left."""

    def __init__(self, op: MPI.Op, datatype: MPI.Datatype) -> None:
        self.op, self.datatype = op, datatype

    def __call__(self, left: Array, right: Array, out: Array, /) -> None:
        num_elements = out.size
        if num_elements == 0:
            return
        left, right, out = (x.view(np.uint8) for x in (left, right, out))
        if _is_same(left, out):  # MPI leaves the result where the right operand was
            result = right.copy()
            self._apply(left, result, num_elements)
            out[...] = result
            return
        if not _is_same(right, out):
            out[...] = right
        self._apply(left, out, num_elements)

    def _apply(self, left: Bytes, right: Bytes, count: int) -> None:
        self.op.Reduce_local([left, count, self.datatype], [right, count, self.datatype])


class Unpacking:
    """An operation on elements of a derived datatype, which is applied to them unpacked.

    `kept`: the same datatype, for when the user has freed his while the call is under way.
    """

    def __init__(self, op: MPI.Op, datatype: MPI.Datatype, kept: MPI.Datatype) -> None:
        self.op, self._datatype, self._kept = op, datatype, kept
        self._wholes: dict[int, tuple[Whole, Whole, Bytes, Bytes]] = {}

    def __call__(self, left: Array, right: Array, out: Array, /) -> None:
        count = out.size
        if count == 0:
            return
        if count not in self._wholes:
            self._wholes[count] = self._room(count)
        left_whole, right_whole, left_bytes, right_bytes = self._wholes[count]
        left_whole.unpack(left.view(np.uint8))
        right_whole.unpack(right.view(np.uint8))
        datatype = self._datatype or self._kept  # the user's function may look at his own
        self.op.Reduce_local([left_bytes, count, datatype], [right_bytes, count, datatype])
        right_whole.pack(out.view(np.uint8))

    def _room(self, count: int) -> tuple[Whole, Whole, Bytes, Bytes]:
        """Memory for two times so many elements, the gaps behind each too; and from where in it
        they are counted."""
        datatype = self._kept
        (first, extent), (true_first, true_extent) = (
            datatype.Get_extent(),
            datatype.Get_true_extent(),
        )
        start = -min(0, first, true_first)
        stop = max(first + extent, true_first + true_extent)
        room = start + (count - 1) * extent + stop
        buffers = [np.zeros(room, np.uint8) for _ in range(2)]
        wholes = [Whole(datatype, count, start, x) for x in buffers]
        return wholes[0], wholes[1], buffers[0][start:], buffers[1][start:]

    def free(self) -> None:
        """Give the datatypes back to MPI."""
        for left, right, *_ in self._wholes.values():
            left.free()
            right.free()
        self._wholes.clear()


def _is_same(x: Bytes, y: Bytes) -> bool:
    """Whether two arrays are the same memory; such as share some are."""
    return bool(x.ctypes.data == y.ctypes.data)
