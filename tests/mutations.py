"""Changes to files at random: what a broken disk, an editor or an enemy might make of them."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np

NUMBERS = [0, -1, 1, 2, 3.5, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, 1e308, 5e-324]
WORDS = ["", "ring", "NaN", "\x1b[2J\x07", "\n\n", "\ud800", "\u0664", "9" * 5000, "x" * 100_000]
NESTED = {f"lists {depth} deep": depth for depth in (3, 900, 50_000)}  # see `as_json`
OTHERS = [None, True, False, float("nan"), float("inf"), [], {}, [[]], {"": None}]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key in a value of JSON."""
    pairs = list(value.items()) if isinstance(value, dict) else []
    pairs = list(enumerate(value)) if isinstance(value, list) else pairs
    for key, inner in pairs:
        yield value, key
        yield from places(inner)


def changed(value: Any, random: Random) -> Any:
    """A value of JSON with one to three changes."""
    value = copy.deepcopy(value)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        inside = list(places(value))
        if not inside:
            return random.choice(OTHERS)
        _change(*random.choice(inside), value, random)
    return value


def _change(holder: Any, key: Any, whole: Any, random: Random) -> None:
    """Replace, delete, double or add something at a place."""
    kind = random.randrange(10)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind == 1:
        holder[random.choice(WORDS)] = holder.pop(key)
    elif kind == 2:
        holder[key] = random.choice(list(NESTED))
    elif kind == 3:
        other, at = random.choice(list(places(whole)))
        holder[key] = copy.deepcopy(other[at])
    elif kind == 4 and type(holder[key]) in (int, float):
        holder[key] = holder[key] * random.choice([-1, 2, 1000]) + random.choice([0, 1, -1])
    else:
        holder[key] = random.choice(random.choice([NUMBERS, WORDS, OTHERS]))


def changed_bytes(data: bytes, random: Random) -> bytes:
    """Bytes with some flipped, cut off, left out, repeated or put in."""
    kind, size = random.randrange(6), len(data)
    start = random.randrange(size + 1)
    stop = min(size, start + random.choice([1, 2, 10, 1000]))
    if kind == 0:
        return data[:start]
    if kind == 1:
        return data[:start] + data[stop:]
    if kind == 2:
        return data[:stop] + data[start:]
    if kind == 3:
        return data[:start] + random.randbytes(stop - start) + data[stop:]
    if kind == 4:
        other = random.choice(
            [b"\0", b"[" * 100_000, b"9" * 5000, b"\xff", b"\n", b'"', b"\x1b[2J"]
        )
        return data[:start] + other + data[start:]
    return bytes(random.choice([b"", b"\0" * 100, b"{}", b"[]", b"null", b"[" * 100_000]))


def changed_text(data: bytes, random: Random) -> bytes:
    """A file of JSON, changed as a value or as bytes."""
    if random.randrange(3) == 0:
        return changed_bytes(data, random)
    return as_json(changed(json.loads(data), random))


def as_json(value: Any) -> bytes:
    """A value of JSON as text, where lists in lists stand for their names."""
    text = json.dumps(value)
    for name, depth in NESTED.items():
        text = text.replace(f'"{name}"', "[" * depth + "]" * depth)
    return text.encode()


def changed_arrays(data: bytes, random: Random) -> bytes:
    """A file of NumPy, changed as arrays or as bytes."""
    if random.randrange(3) == 0:
        return changed_bytes(data, random)
    with np.load(io.BytesIO(data)) as file:
        arrays = {key: file[key] for key in file.files}
    key = random.choice(list(arrays))
    _change_array(arrays, key, random)
    whole = io.BytesIO()
    np.savez_compressed(whole, **arrays)
    return whole.getvalue()


def _change_array(arrays: dict[str, Any], key: str, random: Random) -> None:
    x, kind = arrays[key], random.randrange(9)
    if kind == 0:
        del arrays[key]
    elif kind == 1:
        arrays[random.choice(["", "0", "1/x/0", "-1/0/0", "0/-3/1", "0/0/\x1b[2J", f"0/{key}"])] = x
    elif kind == 2:
        arrays[key] = x.astype(random.choice(["f8", "U5", "u1", "?", "c16", "S3", "i2"]))
    elif kind == 3:
        arrays[key] = random.choice([x[:0], x[:3], x[:-1], x[None], np.int64(3), x[:4], x[::2]])
    else:
        number = random.choice([-1, 0, 1, 2**31, 2**40, 2**62, -(2**62), 7])
        arrays[key] = x.copy()
        arrays[key][random.randrange(min(x.size, random.choice([4, x.size])))] = number
