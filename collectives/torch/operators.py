"""PyTorch's operators of reductions as operators of the library."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from collectives.torch.tensors import Tensor, can_be_combined

_Kind = ReduceOp.RedOpType
_NAMES = {
    _Kind.SUM: "sum",
    _Kind.AVG: "avg",
    _Kind.PREMUL_SUM: "sum",
    _Kind.PRODUCT: "prod",
    _Kind.MIN: "min",
    _Kind.MAX: "max",
    _Kind.BAND: "and",
    _Kind.BOR: "or",
    _Kind.BXOR: "xor",
}
# As in NCCL: a sum of truth values is whether any is true, a product whether all are.
_NAMES_FOR_BOOL = {**_NAMES, _Kind.SUM: "or", _Kind.PRODUCT: "and"}


class Operation(NamedTuple):
    """An operator of PyTorch: the library's name, and a factor of what ranks bring, else None."""

    name: str
    factor: float | Tensor | None = None

    def contribution(self, tensor: Tensor) -> Tensor:
        """Return what this rank brings to a reduction of its `tensor`."""
        return tensor if self.factor is None else tensor.detach() * self.factor


_PLAIN = {kind: Operation(name) for kind, name in _NAMES.items() if kind != _Kind.PREMUL_SUM}
_FOR_BOOL = {kind: Operation(name) for kind, name in _NAMES_FOR_BOOL.items() if kind in _PLAIN}


def operation(op: Any, dtype: torch.dtype, num_ranks: int) -> Operation:
    """Return the operation for tensors of this dtype.

    Averages of float16 are sums of the ranks' parts divided by their number, as in NCCL: a sum that
    is divided afterwards would exceed 65,504 where the average does not.  Raises TypeError if
    tensors of this dtype cannot be combined.
    """
    if not can_be_combined(dtype):
        raise TypeError(f"tensors of dtype {dtype} can be sent, but not combined")
    if op.op == _Kind.AVG and dtype is torch.float16:
        return Operation("sum", 1 / num_ranks)
    plain = (_FOR_BOOL if dtype is torch.bool else _PLAIN).get(op.op)
    if plain is not None:
        return plain
    _, factor = op.__getstate__()  # it has no other name before 2.14
    _check_factor(factor, dtype)
    return Operation("sum", factor)


def _check_factor(factor: float | Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError if products with the factor have another dtype."""
    is_fraction = isinstance(factor, float) or factor.is_floating_point()
    takes_fractions = dtype.is_floating_point or dtype.is_complex
    if dtype is torch.bool or (is_fraction and not takes_fractions):
        raise TypeError(f"PREMUL_SUM with the factor {factor} has no meaning for {dtype}")
