"""Packs the messages of MPI into flat arrays of bytes, and unpacks them.

A message that is contiguous needs no copy.  Another one is packed into an array of the library
before the call, or unpacked after it.  Packing is local.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.engines import Action
from collectives.mpi4py_compat.buffers import Message, Part

Bytes = NDArray[np.uint8]


class PackedMessage(NamedTuple):
    """A message as one flat array, with the number of bytes of each part.

    `load` copies the user's data into the array, and `store` copies it back; both are empty if the
    array is the user's own memory.  `release` frees the datatypes that they need.
    """

    array: Bytes
    sizes: list[int]
    load: tuple[Action, ...] = ()
    store: tuple[Action, ...] = ()
    release: tuple[Action, ...] = ()


def packed(message: Message) -> PackedMessage:
    """Return the message as a flat array: the message's own memory if possible, else a copy.

    Raises ValueError if a part is not within the memory.
    """
    memory = np.empty(0, np.uint8) if message.memory is None else _bytes(message.memory)
    if len(message.parts) == 1:  # mostly it is one block that fills the memory
        ((offset, number, datatype),) = message.parts
        if number and not offset and number * datatype.size == memory.size and is_plain(datatype):
            return PackedMessage(memory, [memory.size])
    part_sizes = sizes(message)
    start, num_bytes = _start(message.parts, part_sizes), sum(part_sizes)
    if start is not None and 0 <= start <= start + num_bytes <= memory.size:
        return PackedMessage(memory[start : start + num_bytes], part_sizes)
    for part in message.parts:
        if part.num_elements and message.memory is not None:
            _check_within(part, memory.size)
    return _packed(message, memory, part_sizes)


def sizes(message: Message) -> list[int]:
    """Return the bytes of each part, without gaps."""
    return [n * datatype.size if n else 0 for _, n, datatype in message.parts]


def is_plain(datatype: MPI.Datatype) -> bool:
    """Return whether elements of this datatype are contiguous bytes without gaps."""
    return datatype.handle in _PLAIN or _is_without_gaps(datatype)


def _is_without_gaps(datatype: MPI.Datatype) -> bool:
    return datatype.is_predefined and datatype.size == datatype.extent


_NAMED = (value for value in vars(MPI).values() if isinstance(value, MPI.Datatype))
_PLAIN = {datatype.handle for datatype in _NAMED if datatype and _is_without_gaps(datatype)}


def _bytes(memory: MPI.buffer) -> Bytes:
    return np.frombuffer(memory, np.uint8)  # type: ignore[call-overload, no-any-return]


def _check_within(part: Part, length: int) -> None:
    """Raise ValueError if MPI would read or write outside of the buffer."""
    lower, extent = part.datatype.Get_true_extent()
    stride = (part.num_elements - 1) * part.datatype.extent
    start = part.offset + lower + min(0, stride)
    stop = part.offset + lower + extent + max(0, stride)
    if extent and not 0 <= start <= stop <= length:
        raise ValueError(
            f"message: {part.num_elements} entries of {extent} bytes at byte {part.offset} "
            f"reach beyond the buffer, which has {length} bytes"
        )


def _start(parts: tuple[Part, ...], sizes: list[int]) -> int | None:
    """Return the offset of the first part if the parts are contiguous and in order, else None."""
    start = stop = plain = None
    for (offset, _, datatype), size in zip(parts, sizes, strict=True):
        if size == 0:
            continue
        if stop not in (None, offset) or not (datatype is plain or is_plain(datatype)):
            return None
        start = offset if start is None else start
        stop, plain = offset + size, datatype
    return start or 0


def _packed(message: Message, memory: Bytes, sizes: list[int]) -> PackedMessage:
    array = np.empty(sum(sizes), np.uint8)
    end = 0
    load: list[Action] = []
    store: list[Action] = []
    release: list[Action] = []
    for part, size in zip(message.parts, sizes, strict=True):
        if size == 0:
            continue
        begin, end = end, end + size
        place = array[begin:end]
        if message.memory is not None and is_plain(part.datatype):
            there = memory[part.offset : part.offset + size]
            load.append(partial(np.copyto, place, there))
            store.append(partial(np.copyto, there, place))
            continue
        whole = BlockType(part.datatype, part.num_elements, part.offset, memory)
        load.append(partial(whole.pack, place))
        store.append(partial(whole.unpack, place))
        release.append(whole.free)
    return PackedMessage(array, sizes, tuple(load), tuple(store), tuple(release))


class BlockType:
    """A derived datatype that combines several elements of a datatype into one.

    It remains valid when the user frees the other datatype, as MPI allows.
    """

    def __init__(self, datatype: MPI.Datatype, count: int, offset: int, memory: Bytes) -> None:
        # An element at the absolute address a has the offset a - b from an anchor at address b.
        self._anchor: Any = memory[:1] if memory.size else np.empty(1, np.uint8)
        if not memory.size:
            offset -= int(self._anchor.ctypes.data)
        row = datatype.Create_hvector(count, 1, datatype.extent)
        placed = row.Create_hindexed([1], [offset])
        self._datatype = placed.Create_resized(0, 1).Commit()
        row.Free()
        placed.Free()

    def pack(self, place: Bytes) -> None:
        """Copy the elements to `place` without gaps."""
        end = self._datatype.Pack(self._anchor, place, 0, MPI.COMM_SELF)
        assert end == place.size, f"packed {end} bytes instead of {place.size}"

    def unpack(self, place: Bytes) -> None:
        """Copy the elements back from `place`."""
        self._datatype.Unpack(place, 0, self._anchor, MPI.COMM_SELF)

    def free(self) -> None:
        """Free the datatype."""
        self._datatype.Free()
