"""The header: a small message that describes the array that a rank is about to receive.

It consists of JSON and numbers.  Nothing that another rank sends is unpickled, and a header is
accepted only if it describes plain memory.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import is_bfloat16
from collectives.errors import CollectiveMismatch

NUM_BYTES = 256


class Header(NamedTuple):
    """The root's array: kind of memory, dtype, shape; in a scatter also the rows of each rank."""

    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    counts: tuple[int, ...] = ()


def num_bytes(num_counts: int) -> int:
    """Return the length in bytes of a header with `num_counts` counts."""
    return NUM_BYTES + 8 * num_counts


def encode(header: Header) -> NDArray[np.uint8]:
    """Return the header as bytes.  Raise ValueError if the array cannot be described."""
    text = json.dumps([header.kind, _dtype_name(header.dtype), header.shape]).encode()
    if len(text) > NUM_BYTES:
        raise ValueError(f"an array of {len(header.shape)} dimensions needs out= on every rank")
    counts = np.array(header.counts, "<i8").tobytes()
    return np.frombuffer(text.ljust(NUM_BYTES) + counts, np.uint8)


def decode(message: NDArray[np.uint8]) -> Header:
    """Return the header in a message.  Raise CollectiveMismatch if the message is not a header."""
    try:
        kind, name, shape = json.loads(bytes(message[:NUM_BYTES]))
        counts = message[NUM_BYTES:].view("<i8").tolist()
        return Header(_text(kind), _plain(_text(name)), _sizes(shape), _sizes(counts))
    except (TypeError, ValueError) as error:
        raise CollectiveMismatch(
            f"the message is not the header of an array ({error}): the ranks' calls do not match"
        ) from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _sizes(values: object) -> tuple[int, ...]:
    """Return a shape, or counts."""
    if not isinstance(values, list) or any(type(n) is not int or n < 0 for n in values):
        raise ValueError(f"{values!r} is not a list of sizes")
    return tuple(values)


def _plain(name: str) -> np.dtype[Any]:
    """Return the dtype of a name that `encode` wrote.

    Raises ValueError if its elements are not plain bytes.
    """
    if name != "bfloat16" and not re.fullmatch(r"[<>|][a-zA-Z]\d+(\[\w+\])?", name):
        raise ValueError(f"{name!r} is not the name of a dtype")
    dtype = _dtype(name)
    if dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(f"elements of dtype {dtype} are not plain bytes")
    return dtype


def _dtype_name(dtype: np.dtype[Any]) -> str:
    name = "bfloat16" if is_bfloat16(dtype) else dtype.str
    if _dtype(name) != dtype:
        raise ValueError(f"a header cannot describe dtype {dtype}; pass out= on every rank")
    return name


def _dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes  # noqa: PLC0415 - only if it is used

    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16
