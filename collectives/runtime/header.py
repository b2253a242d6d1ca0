"""The small message that tells a rank without an array what it is about to receive.

It is JSON and numbers.  Nothing that another rank sent is ever unpickled, and a header is believed
only if it describes plain memory.
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
    """The root's array: kind of memory, dtype, shape; and its rows per rank where it is split."""

    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    counts: tuple[int, ...] = ()


def num_bytes(num_counts: int) -> int:
    """The length of a header with so many counts."""
    return NUM_BYTES + 8 * num_counts


def encode(header: Header) -> NDArray[np.uint8]:
    """The header as bytes.  Raises ValueError for what does not fit or is ambiguous."""
    text = json.dumps([header.kind, _dtype_name(header.dtype), header.shape]).encode()
    if len(text) > NUM_BYTES:
        raise ValueError(f"an array of {len(header.shape)} dimensions needs out= on every rank")
    counts = np.array(header.counts, "<i8").tobytes()
    return np.frombuffer(text.ljust(NUM_BYTES) + counts, np.uint8)


def decode(message: NDArray[np.uint8]) -> Header:
    """The header again.  Raises CollectiveMismatch if the message is none."""
    try:
        kind, name, shape = json.loads(bytes(message[:NUM_BYTES]))
        counts = message[NUM_BYTES:].view("<i8").tolist()
        return Header(_text(kind), _plain(_text(name)), _sizes(shape), _sizes(counts))
    except (TypeError, ValueError) as error:
        raise CollectiveMismatch(
            f"what came is no header of an array ({error}): the ranks did not make the same call"
        ) from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _sizes(values: object) -> tuple[int, ...]:
    """A shape, or counts."""
    if not isinstance(values, list) or any(type(n) is not int or n < 0 for n in values):
        raise ValueError(f"{values!r} are no sizes")
    return tuple(values)


def _plain(name: str) -> np.dtype[Any]:
    """The dtype of this name, as `encode` spells names.  Objects have no place in a message."""
    if name != "bfloat16" and not re.fullmatch(r"[<>|][a-zA-Z]\d+(\[\w+\])?", name):
        raise ValueError(f"{name!r} is the name of no dtype")
    dtype = _dtype(name)
    if dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(f"elements of dtype {dtype} are not plain bytes")
    return dtype


def _dtype_name(dtype: np.dtype[Any]) -> str:
    name = "bfloat16" if is_bfloat16(dtype) else dtype.str
    if _dtype(name) != dtype:
        raise ValueError(f"dtype {dtype} cannot be announced to the other ranks; pass out= on all")
    return name


def _dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes  # noqa: PLC0415 - only where somebody uses it

    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16
