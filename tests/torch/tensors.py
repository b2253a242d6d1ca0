"""Small tensors that every rank can work out for every rank, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

Tensor: TypeAlias = torch.Tensor

SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTEGERS = [*SIGNED, *UNSIGNED]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
NUMBERS = [*INTEGERS, *FLOATS, *COMPLEX]
ONLY_MOVED = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [torch.bool, *NUMBERS, *ONLY_MOVED]

# The dtypes that each operator takes, and what it does with two arrays.
OPS = {
    "SUM": ([torch.bool, *NUMBERS], np.add),
    "PRODUCT": ([torch.bool, *INTEGERS, *FLOATS], np.multiply),  # PyTorch refuses complex ones
    "MIN": ([torch.bool, *INTEGERS, *FLOATS], np.minimum),
    "MAX": ([torch.bool, *INTEGERS, *FLOATS], np.maximum),
    "AVG": ([*FLOATS, *COMPLEX], np.add),
    "BAND": ([torch.bool, *INTEGERS], np.bitwise_and),
    "BOR": ([torch.bool, *INTEGERS], np.bitwise_or),
    "BXOR": ([torch.bool, *INTEGERS], np.bitwise_xor),
}


def drawn(
    rank: int, shape: Sequence[int] = (3, 2), dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    """What a rank brings: whole numbers from 1 to 3, so that results are exact in every order."""
    numbers = np.random.default_rng([seed, rank]).integers(1, 4, tuple(shape))
    if dtype is torch.bool:
        return torch.tensor(numbers > 1)
    made = torch.tensor(numbers).to(dtype)
    return made * (1 + 2j) if dtype.is_complex else made


def all_drawn(
    shape: Sequence[int] = (3, 2), dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    """What the ranks of the default group bring."""
    return [drawn(rank, shape, dtype, seed) for rank in range(dist.get_world_size())]


def combined(op: str, tensors: Sequence[Tensor]) -> Tensor:
    """What a reduction of the tensors must give, computed by NumPy."""
    dtype = tensors[0].dtype
    combine: Callable[..., np.ndarray] = OPS[op][1]
    total = reduce(combine, [values(tensor) for tensor in tensors])
    if op == "AVG":
        total = total / len(tensors)
    return torch.tensor(total).to(dtype)


def values(tensor: Tensor) -> np.ndarray:
    """The values as an array, also of the dtypes that NumPy does not have."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    is_known = plain.dtype not in (torch.bfloat16, *ONLY_MOVED)
    return (plain if is_known else plain.float()).numpy()


def check(actual: Tensor, expected: Tensor) -> None:
    """The two tensors must have the same dtype, shape and values."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(values(actual), values(expected))


def check_all(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        check(one, other)


def blank(like: Tensor) -> Tensor:
    """A tensor of the same shape and dtype that holds nothing which the library could send."""
    return torch.zeros(like.shape, dtype=like.dtype)


def blanks(like: Sequence[Tensor]) -> list[Tensor]:
    return [blank(tensor) for tensor in like]


def operator(name: str) -> ReduceOp:
    return getattr(ReduceOp, name)
