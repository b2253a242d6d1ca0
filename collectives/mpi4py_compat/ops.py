"""MPI's operations as operators of the library.

If an operator of the library computes the same on a datatype, it is used.  All others, and those
that users define, are applied by `MPI.Op.Reduce_local`, which sends nothing.  The minimum and the
maximum of NaN and a number, which MPI does not define, are NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.arrays import OPERATORS, Array, Backend, Operator
from collectives.engines import Action
from collectives.mpi4py_compat.memory import BlockType, Bytes, is_plain

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


# The arguments of the library's own call for one of MPI's operations, by dtype and identity.
PLAIN_OPERATORS: dict[tuple[np.dtype[Any], int], dict[str, str]] = {
    (np.dtype(char), id(op)): {} if name == "sum" else {"op": name}
    for char in "bBhHiIlLqQfdFD"  # dtypes that are the same in MPI and NumPy
    for name, op in OPERATIONS.items()
    if np.dtype(char).kind in (OPERATORS[name].kinds or "")
}


class DtypeOperator(NamedTuple):
    """An operator, and the dtype of the elements that it combines."""

    dtype: np.dtype[Any]
    operator: str | Operator
    release: tuple[Action, ...] = ()


def operator_for(op: MPI.Op, datatype: MPI.Datatype) -> DtypeOperator:
    """Return the operator for an MPI operation on a datatype.

    Raises MPI.Exception, as MPI does, if the operation is not defined for the datatype.
    """
    if not isinstance(op, MPI.Op):
        raise TypeError(
            f"Argument 'op' has incorrect type (expected mpi4py.MPI.Op, got {type(op).__name__})"
        )
    dtype, name = _DTYPES.get(datatype.handle), _NAMES.get(op.handle)
    if name is not None and dtype is not None and _serves(OPERATORS[name], dtype):
        return DtypeOperator(dtype, name)
    if not op or op in (MPI.REPLACE, MPI.NO_OP):
        raise MPI.Exception(MPI.ERR_OP)
    if not datatype or not datatype.size:
        raise MPI.Exception(MPI.ERR_TYPE)
    if datatype.extent < 0:
        raise NotImplementedError("a reduction of a datatype with a negative extent")
    dtype = np.dtype((np.void, datatype.size))
    if is_plain(datatype):
        local = LocalReduction(op, datatype)
        return DtypeOperator(dtype, MpiOperator.of(op, local))
    if datatype.is_predefined:
        unpacking = UnpackingReduction(op, datatype, datatype)
        return DtypeOperator(dtype, MpiOperator.of(op, unpacking), (unpacking.free,))
    kept = datatype.Dup()
    unpacking = UnpackingReduction(op, datatype, kept)
    return DtypeOperator(dtype, MpiOperator.of(op, unpacking), (unpacking.free, kept.Free))


def _serves(operator: Operator, dtype: np.dtype[Any]) -> bool:
    try:
        operator.check(dtype)
    except TypeError:
        return False
    return True


class MpiOperator(Operator):
    """An operator that is an MPI operation."""

    @classmethod
    def of(cls, op: MPI.Op, function: LocalReduction | UnpackingReduction) -> MpiOperator:
        """Return the operator whose `function` applies `op` to arrays of packed elements."""
        name = "an MPI operation" if op.is_predefined else "a user's MPI operation"
        return cls(name, function, is_commutative=op.Is_commutative())

    def rehearse(self, backend: Backend, x: Array) -> None:
        """Try only MPI's own operations, because a user's function may have side effects."""
        if (
            isinstance(self.function, (LocalReduction, UnpackingReduction))
            and self.function.op.is_predefined
        ):
            super().rehearse(backend, x)


class LocalReduction:
    """An operation on contiguous elements.  MPI's argument `in` is the left operand."""

    def __init__(self, op: MPI.Op, datatype: MPI.Datatype) -> None:
        self.op, self.datatype = op, datatype

    def __call__(self, left: Array, right: Array, out: Array, /) -> None:
        num_elements = out.size
        if num_elements == 0:
            return
        left, right, out = (x.view(np.uint8) for x in (left, right, out))
        if _is_same(left, out):  # MPI writes the result over the right operand
            result = right.copy()
            self._apply(left, result, num_elements)
            out[...] = result
            return
        if not _is_same(right, out):
            out[...] = right
        self._apply(left, out, num_elements)

    def _apply(self, left: Bytes, right: Bytes, count: int) -> None:
        self.op.Reduce_local([left, count, self.datatype], [right, count, self.datatype])


class UnpackingReduction:
    """An operation on elements of a derived datatype, which are unpacked for it.

    Parameters
    ----------
    op, datatype : MPI.Op, MPI.Datatype
        The operation, and the datatype of its elements.
    kept : MPI.Datatype
        A duplicate of the datatype, in case the user frees the original during the call.
    """

    def __init__(self, op: MPI.Op, datatype: MPI.Datatype, kept: MPI.Datatype) -> None:
        self.op, self._datatype, self._converting = op, datatype, kept
        self._block_types: dict[int, tuple[BlockType, BlockType, Bytes, Bytes]] = {}

    def __call__(self, left: Array, right: Array, out: Array, /) -> None:
        count = out.size
        if count == 0:
            return
        if count not in self._block_types:
            self._block_types[count] = self._allocate(count)
        left_whole, right_whole, left_bytes, right_bytes = self._block_types[count]
        left_whole.unpack(left.view(np.uint8))
        right_whole.unpack(right.view(np.uint8))
        datatype = self._datatype or self._converting  # a user's function may check its datatype
        self.op.Reduce_local([left_bytes, count, datatype], [right_bytes, count, datatype])
        right_whole.pack(out.view(np.uint8))

    def _allocate(self, count: int) -> tuple[BlockType, BlockType, Bytes, Bytes]:
        """Return datatypes and memory for two operands of `count` elements with their gaps."""
        datatype = self._converting
        (first, extent), (true_first, true_extent) = (
            datatype.Get_extent(),
            datatype.Get_true_extent(),
        )
        start = -min(0, first, true_first)
        stop = max(first + extent, true_first + true_extent)
        room = start + (count - 1) * extent + stop
        buffers = [np.zeros(room, np.uint8) for _ in range(2)]
        wholes = [BlockType(datatype, count, start, x) for x in buffers]
        return wholes[0], wholes[1], buffers[0][start:], buffers[1][start:]

    def free(self) -> None:
        """Free the datatypes."""
        for left, right, *_ in self._block_types.values():
            left.free()
            right.free()
        self._block_types.clear()


def _is_same(x: Bytes, y: Bytes) -> bool:
    """Return whether two arrays are the same memory, given that they do not overlap partly."""
    return bool(x.ctypes.data == y.ctypes.data)
