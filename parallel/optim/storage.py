"""Storage in which a rank keeps arrays: with the model, in host memory, or on a disk.

`parallel.optim.Offload` updates masters and optimizer states in a storage.  Another storage has
the activations of a layer from its forward to its backward pass, so that the device keeps the
activations of one layer at a time.  A storage counts the bytes that it moves: NumPy's arrays are in
host memory already, so that nothing moves to and from a device.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import numpy as np

from parallel.accounts import arrays_in, owner_of
from parallel.nn import Array, Shape

TO_HOST, TO_DEVICE = DEVICE_COLUMNS = "to host", "to device"
READ, WRITTEN = "read from disk", "written to disk"
OFFLOADED = "activations, offloaded"  # the category of memory of activations that have been moved


class Storage:
    """Keeps arrays in the memory of the model, so that nothing moves; the base class.

    `rank` is part of the names of files; `xp` is the array namespace of the model.  `moved` has the
    bytes moved so far, by `COLUMNS`.  If `is_cross_device`, the model is in a device's memory and
    the storage is not.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, rank: int, xp: Any) -> None:
        self.xp, self.moved = xp, Counter[str]()
        self.is_cross_device = bool(self.COLUMNS) and not isinstance(xp.empty(0), np.ndarray)

    @property
    def columns(self) -> tuple[str, ...]:
        """The `COLUMNS` that are not always 0."""
        return tuple(x for x in self.COLUMNS if self.is_cross_device or x not in DEVICE_COLUMNS)

    def zeros(self, name: str, size: int, dtype: np.dtype[Any]) -> Array:
        """Return `size` zeros of this `dtype`, 1-d; `name` is the name of their file."""
        return self.xp.zeros(size, dtype=dtype)

    def copy_here(self, x: Array, buffer: Array | None = None) -> Array:
        """Return `x` of the model; from a device, return a copy, in `buffer` or in a new array."""
        if not self.is_cross_device:
            return x
        host = np.empty(x.shape, x.dtype) if buffer is None else buffer[: x.shape[0]]
        if host.size:
            x.get(out=host)
        self.moved[TO_HOST] += host.nbytes
        return host

    def copy_back(self, kept: Array, x: Array, buffer: Array | None = None) -> None:
        """Set `x` of the model to `kept`; for a device, round `kept` in `buffer` first."""
        if not self.is_cross_device:
            if x is not kept:
                x[...] = kept
            return
        if buffer is not None:
            buffer[: x.shape[0]] = kept
            kept = buffer[: x.shape[0]]
        if kept.size:
            x.set(kept)
        self.moved[TO_DEVICE] += kept.nbytes

    def begin_update(self, arrays: list[Array]) -> None:
        """Prepare to read and change `arrays`, which are kept here."""

    def end_update(self, arrays: list[Array]) -> None:
        """Release `arrays`, which have been written and are not needed before the next update."""

    def put(self, held: Any) -> Any:
        """Store the arrays in nested containers `held`; return containers of what is stored."""
        return replaced(held, self._store) if self.columns else held

    def take(self, kept: Any) -> Any:
        """Return the containers that were `put`, on their device; `kept` is the result of `put`."""
        return replaced(kept, self._fetch) if self.columns else kept

    def _store(self, x: Array) -> Any:
        return self.copy_here(x)

    def _fetch(self, kept: Any) -> Array:
        if not self.is_cross_device:
            return kept
        x = self.xp.empty(kept.shape, dtype=kept.dtype)
        self.copy_back(kept, x)
        return x


class HostMemory(Storage):
    """Keeps arrays in host memory; updates are made by NumPy.  ZeRO-Offload: Ren et al. 2021.

    `rank` is this rank, and `xp` the array namespace of the model; a device's arrays need CuPy's
    ``get(out=)`` and ``set``.  Activations come back contiguous, in C order.  An array that
    several parts of a layer save, in whatever shapes, is moved once.  An array that several layers
    save is moved for each layer, and a view of a part of an array is moved as an array of its own.
    `Model.activation_bytes` counts these once: predictions are exact for models without such
    arrays, such as `parallel.gpt`.

    Examples
    --------
    >>> from parallel import HostMemory, Recipe
    >>> recipe = Recipe(offload=HostMemory, offload_activations=HostMemory)
    """

    COLUMNS: ClassVar[tuple[str, ...]] = DEVICE_COLUMNS

    def zeros(self, name: str, size: int, dtype: np.dtype[Any]) -> Array:
        return np.zeros(size, dtype)


class Disk(HostMemory):
    """Keeps each array in a file, in a directory of this rank that is created in `folder`.

    ZeRO-Infinity: Rajbhandari et al. 2021.  Masters and optimizer states are mapped into memory.
    When a unit has been updated, its files are written to the disk, through the operating system's
    cache, and this process releases their pages, so that it holds the pages of one unit at most.
    The directory is removed by `close`, with the training run, or when Python ends; if the process
    is killed, it stays.  Raises OSError if there is no space.  `rank` and `xp` are as in
    `HostMemory`.

    Examples
    --------
    >>> from functools import partial
    >>> from parallel import Disk, Recipe
    >>> recipe = Recipe(offload=partial(Disk, "/scratch"))
    """

    COLUMNS = (*DEVICE_COLUMNS, READ, WRITTEN)

    def __init__(self, folder: str | Path, rank: int, xp: Any) -> None:
        super().__init__(rank, xp)
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"rank{rank}-", dir=folder))
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._numbers = count()

    def close(self) -> None:
        """Remove the files.  Updates can go on in memory; activations cannot be put here."""
        self._remove()

    def zeros(self, name: str, size: int, dtype: np.dtype[Any]) -> Array:
        if size == 0:  # an empty file cannot be mapped
            return super().zeros(name, size, dtype)
        path = self.folder / quote(name, safe="")
        with path.open("xb") as file:
            # Reserve the space now: a full disk at a later write would kill the process.
            os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
        return np.memmap(path, dtype, "r+", shape=(size,))

    def begin_update(self, arrays: list[Array]) -> None:
        self.moved[READ] += sum(x.nbytes for x in arrays)

    def end_update(self, arrays: list[Array]) -> None:
        self.moved[WRITTEN] += sum(x.nbytes for x in arrays)
        for x in arrays:
            if x.size:
                x.flush()
                x.base.madvise(mmap.MADV_DONTNEED)

    def _store(self, x: Array) -> OnFile:
        host = super()._store(x)
        path = self.folder / str(next(self._numbers))
        stored = OnFile(path, host.shape, host.dtype, host.nbytes)
        weakref.finalize(stored, path.unlink, missing_ok=True)
        host.tofile(path)
        self.moved[WRITTEN] += host.nbytes
        return stored

    def _fetch(self, kept: OnFile) -> Array:
        host = np.fromfile(kept.path, np.uint8).view(kept.dtype).reshape(kept.shape)
        self.moved[READ] += host.nbytes
        return super()._fetch(host)


@dataclass(eq=False)
class OnFile:
    """An array in a file that is not open; a `MemoryTracker` counts it."""

    path: Path
    shape: Shape
    dtype: np.dtype[Any]
    nbytes: int
    base: OnFile | None = None  # the original, if this is the same array in another shape

    def reshape(self, shape: Shape) -> OnFile:
        """Return the same array in another `shape`."""
        return replace(self, shape=shape, base=self.base or self)


def replaced(held: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested containers with ``change(x)`` for each array.

    `change` is called once for the same array, even if it occurs in different shapes.
    """
    new: dict[int, Any] = {}
    changed: dict[object, Any] = {}
    for x in arrays_in(held):
        if (key := elements_of(x)) not in changed:
            changed[key] = change(x)
        same = changed[key]
        new[id(x)] = same if same.shape == x.shape else same.reshape(x.shape)
    return with_new(held, new)


def elements_of(x: Any) -> object:
    """Return a key that is equal for arrays of the same elements in the same order."""
    owner = owner_of(x)
    if isinstance(owner, OnFile):
        return owner.path
    is_whole = x.flags.c_contiguous and x.nbytes == owner.nbytes
    return (id(owner), x.dtype) if is_whole else id(x)


def with_new(held: Any, new: Mapping[int, Any]) -> Any:
    """Return nested containers with `new` values of objects, given by `id`."""
    if isinstance(held, dict):
        return {key: with_new(x, new) for key, x in held.items()}
    if isinstance(held, list | tuple):
        items = [with_new(x, new) for x in held]
        return getattr(held, "_make", type(held))(items)  # a named tuple has _make
    return new.get(id(held), held)
