"""Functions of arrays that several layers use.

Two-byte dtypes (float16, bfloat16) are used for storage and communication.  Every function computes
with them in float32 and rounds its result once, as the matrix units of a GPU do.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace

import collectives

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray; the array API has no type to name
SPLIT_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

_namespaces: dict[type, Any] = {}


def namespace_of(x: Array) -> Any:
    """Return the array namespace of `x`, which is looked up once for every type of array."""
    if type(x) not in _namespaces:
        _namespaces[type(x)] = array_namespace(x)
    return _namespaces[type(x)]


def new_array(shape: tuple[int, ...], like: Array, dtype: Any = None) -> Array:
    """Return an array with arbitrary contents on the device of `like`.

    The array has the dtype of `like` unless a `dtype` is given.  In host memory `collectives.empty`
    makes the array.
    """
    dtype = like.dtype if dtype is None else dtype
    if type(like) is np.ndarray:
        return collectives.empty(shape, dtype)
    return namespace_of(like).empty(shape, dtype=dtype)


def upcast(x: Array) -> Array:
    """Return `x` in the dtype to compute in: float32 for two-byte dtypes, else unchanged."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def cast(x: Array, dtype: Any) -> Array:
    """Return `x` in a `dtype`, without a copy if `x` has this dtype already."""
    return x.astype(dtype) if x.dtype != dtype else x


def matmul(a: Array, b: Array) -> Array:
    """Return ``a @ b``, rounded once to the dtype of `a`."""
    return cast(upcast(a) @ upcast(b), a.dtype)


def scales_for(largest: Array, steps: int) -> Array:
    """Return the scales with which the integers up to `steps` reach the magnitudes `largest`.

    A number is quantized to the nearest integer times a scale.  A scale is at least the smallest
    normal number, because a smaller scale would have few digits.
    """
    smallest = float(np.finfo(largest.dtype).smallest_normal)
    return namespace_of(largest).maximum(largest / steps, smallest)


def sum_rows(x: Array) -> Array:
    """Return the sum over axis 0, rounded once to the dtype of `x`."""
    return cast(namespace_of(x).sum(upcast(x), axis=0), x.dtype)


def on_host(array: Array) -> np.ndarray[Any, Any]:
    """Return an `array` as a NumPy array: a copy in host memory if it is on a device."""
    host: np.ndarray[Any, Any] = array.get() if hasattr(array, "get") else array
    return host


def flatten_rows(x: Array) -> Array:
    """Return `x` (..., n) as (rows, n)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def transpose(x: Array) -> Array:
    """Return `x` with its last two axes exchanged."""
    return namespace_of(x).matrix_transpose(x)


def causal(scores: Array) -> Array:
    """Return matrices of `scores` with minus infinity where a query must not see a key.

    The last query sees all keys, and every query before it sees one key less.
    """
    xp, (num_rows, num_columns) = namespace_of(scores), scores.shape[-2:]
    position = xp.arange(num_columns, device=scores.device)
    is_seen = position[num_columns - num_rows :, None] >= position[None, :]
    return xp.where(is_seen, scores, xp.asarray(-math.inf, dtype=scores.dtype))


def softmax(scores: Array) -> Array:
    """Return the softmax of `scores` over the last axis."""
    xp = namespace_of(scores)
    powers = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    return powers / xp.sum(powers, axis=-1, keepdims=True)


def one_hot(classes: Array, num_classes: int, dtype: Any) -> Array:
    """Return a matrix (rows, `num_classes`) with a one in the column of the class of each row.

    `classes` are integers (rows,).  A row is zero if its integer is not a class.
    """
    xp = namespace_of(classes)
    columns = xp.arange(num_classes, device=classes.device)
    return (classes[:, None] == columns[None, :]).astype(dtype)


def mix64(z: Array) -> Array:
    """Return the hash of unsigned 64-bit integers that SplitMix64 uses.  Steele et al. 2014."""
    z = (z ^ (z >> np.uint64(30))) * SPLIT_MIX[0]
    z = (z ^ (z >> np.uint64(27))) * SPLIT_MIX[1]
    return z ^ (z >> np.uint64(31))


def check_classes(what: str, classes: np.ndarray[Any, Any], num_classes: int) -> None:
    """Raise ValueError unless all `classes`, integers, are at least 0 and below `num_classes`."""
    for extreme in (np.min, np.max) if classes.size else ():
        if not 0 <= (number := float(extreme(classes))) < num_classes:
            raise ValueError(f"a {what} is {number:.0f}: there are classes 0 to {num_classes - 1}")
