"""Where updates are made: on the device, in host memory or on disk.

An `Offload` keeps master copies of what a rank updates, and the optimizer's states, and updates
them where they are.  If that is not the device, the gradient of a unit is copied there, and its new
parameters are copied back, before the next unit is updated.

    Recipe(offload=HostOffload)                          # ZeRO-Offload: Ren et al. 2021
    Recipe(offload=partial(DiskOffload, "/scratch"))     # ZeRO-Infinity: Rajbhandari et al. 2021

For n elements that a rank updates (Psi, or its part Psi/N), with w bytes each, W bytes in the dtype
of updates, and an optimizer with S states, an update moves

| column          | offload                    | bytes       |
|-----------------|----------------------------|-------------|
| to host         | `HostOffload, DiskOffload` | n w         |
| to device       | `HostOffload, DiskOffload` | n w         |
| read from disk  | `DiskOffload`              | n W (1 + S) |
| written to disk | `DiskOffload`              | n W (1 + S) |

When masters are initialized, n w bytes go to the host and n W to the disk.  NumPy's arrays are in
host memory already: nothing moves to and from a device then, and both columns are 0.  The columns
of the disk count what is read and written through the operating system, which may cache it.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import quote

import numpy as np

from parallel.accounts.tracker import MemoryTracker
from parallel.nn import Array
from parallel.optim.optimizers import Optimizer, zeros_like
from parallel.optim.precision import master_dtype

TO_HOST, TO_DEVICE = DEVICE_COLUMNS = "to host", "to device"
READ, WRITTEN = "read from disk", "written to disk"


class Offload(Protocol):
    """Where a rank keeps its master copies and optimizer states and makes its updates.

    A training run makes its own by calling `Recipe.offload` with its memory tracker and rank.

    Attributes
    ----------
    COLUMNS : tuple of str
        What `moved` counts; a class attribute.
    memory : MemoryTracker
        Counts what is kept: the run's tracker if that is on the device, else another one, with
        the same categories.
    moved : Counter of str
        The bytes moved so far, by `COLUMNS`.
    num_loads : int
        How often `load` was called.
    is_cross_device : bool
        Whether the parameters are in a device's memory and the masters are not.
    """

    COLUMNS: ClassVar[tuple[str, ...]]
    memory: MemoryTracker
    moved: Counter[str]
    num_loads: int
    is_cross_device: bool

    def make_masters(
        self, parameters: Mapping[str, Array], dtype: np.dtype[Any]
    ) -> Mapping[str, Array]:
        """Return the arrays to update instead of `parameters`, in this dtype, and load them.

        `parameters` are flat arrays by unit.  The offload keeps them: `load` reads them and
        `update` writes them.
        """

    def zeros(self, master: Array) -> Array:
        """Return a new optimizer state for one of the masters."""

    def load(self) -> None:
        """Set the masters to the values of the parameters, which have been changed."""

    def update(self, optimizer: Optimizer, gradients: Mapping[str, Array], factor: float) -> None:
        """Make one step of `optimizer` with gradients times `factor`; set the parameters.

        Units without a gradient do not change.
        """


class NoOffload(Offload):
    """Updates on the device; the masters are the parameters unless their dtypes differ.

    Parameters
    ----------
    memory : MemoryTracker
        Counts the masters and optimizer states.
    rank : int
        Not used: nothing is written to files.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ()
    is_cross_device = False

    def __init__(self, memory: MemoryTracker, rank: int) -> None:
        self.memory, self.moved, self.num_loads = memory, Counter[str](), 0

    def make_masters(
        self, parameters: Mapping[str, Array], dtype: np.dtype[Any]
    ) -> Mapping[str, Array]:
        self.parameters = self.masters = parameters
        if any(x.dtype != dtype for x in parameters.values()):
            copies = {unit: x.astype(dtype) for unit, x in parameters.items()}
            self.masters = self.memory.track("master", copies)
        return self.masters

    def zeros(self, master: Array) -> Array:
        return self.memory.track("optimizer", zeros_like(master))

    def load(self) -> None:
        self.num_loads += 1
        if self.masters is not self.parameters:
            for unit, master in self.masters.items():
                master[...] = self.parameters[unit]

    def update(self, optimizer: Optimizer, gradients: Mapping[str, Array], factor: float) -> None:
        optimizer.step(gradients, factor)
        if self.masters is not self.parameters:
            for unit in gradients:
                self.parameters[unit][...] = self.masters[unit]


class HostOffload(Offload):
    """Updates in host memory, by NumPy.  Ren et al. 2021 (ZeRO-Offload).

    Everything to and from a device goes through one buffer, as large as the largest part of a unit
    that this rank updates.  A device's arrays need CuPy's ``get(out=)`` and ``set``.  See `Offload`
    for the methods and attributes.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = DEVICE_COLUMNS
    is_cross_device = False  # `make_masters` sees whether the parameters are on a device

    def __init__(self, memory: MemoryTracker, rank: int) -> None:
        self.memory, self.num_loads = MemoryTracker(), 0
        self.moved = Counter(dict.fromkeys(self.COLUMNS, 0))
        self._kept: dict[str, list[Array]] = {}  # of each unit: the master, then its states

    def make_masters(
        self, parameters: Mapping[str, Array], dtype: np.dtype[Any]
    ) -> Mapping[str, Array]:
        self.parameters = parameters
        self.is_cross_device = not all(isinstance(x, np.ndarray) for x in parameters.values())
        if self.is_cross_device:
            largest = max(parameters.values(), key=lambda x: int(x.shape[0]))
            self._buffer = self.memory.track("buffers", np.empty(largest.shape[0], largest.dtype))
        self.masters = {unit: self._new("master", unit, x, dtype) for unit, x in parameters.items()}
        self.load()
        return self.masters

    def zeros(self, master: Array) -> Array:
        unit = next(unit for unit, x in self.masters.items() if x is master)
        return self._new("optimizer", unit, master, master.dtype)

    def _new(self, category: str, unit: str, like: Array, dtype: np.dtype[Any]) -> Array:
        kept = self._kept.setdefault(unit, [])
        name = f"{unit}.state{len(kept)}" if kept else f"{unit}.master"
        kept.append(self.memory.track(category, self._zeros(name, like.shape[0], dtype)))
        return kept[-1]

    def _zeros(self, name: str, num_elements: int, dtype: np.dtype[Any]) -> Array:
        return np.zeros(num_elements, dtype)

    def load(self) -> None:
        self.num_loads += 1
        for unit, master in self.masters.items():
            master[...] = self._copy_to_host(self.parameters[unit])
            self._after_write([master])

    def update(self, optimizer: Optimizer, gradients: Mapping[str, Array], factor: float) -> None:
        optimizer.step(self._one_at_a_time(gradients), factor)

    def _one_at_a_time(self, gradients: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """Yield each unit's gradient in host memory; finish a unit when the next is asked for."""
        for unit, gradient in gradients.items():
            self._before_read(self._kept[unit])
            yield unit, self._copy_to_host(gradient)
            self._copy_back(self.masters[unit], self.parameters[unit])
            self._after_write(self._kept[unit])

    def _before_read(self, arrays: list[Array]) -> None:
        """Called when these are about to be read."""

    def _after_write(self, arrays: list[Array]) -> None:
        """Called when these have been written and are not needed before the next update."""

    def _copy_to_host(self, x: Array) -> Array:
        """Return `x` in host memory; a copy from a device is valid until the next copy."""
        if not self.is_cross_device:
            return x
        host = self._buffer[: x.shape[0]]
        if host.size:
            x.get(out=host)
        self.moved[TO_HOST] += host.nbytes
        return host

    def _copy_back(self, master: Array, x: Array) -> None:
        """Set `x` to the master's values, rounded on the host."""
        if not self.is_cross_device:
            x[...] = master
            return
        host = self._buffer[: x.shape[0]]
        host[...] = master
        if host.size:
            x.set(host)
        self.moved[TO_DEVICE] += host.nbytes


class DiskOffload(HostOffload):
    """Updates in files that are mapped into memory.  Rajbhandari et al. 2021 (ZeRO-Infinity).

    Each master and each state is a file in a directory of this rank, which is created in `folder`.
    As soon as a unit has been updated, its files are written to the disk and this process releases
    their pages, so that it holds those of one unit at most.  The directory is removed by `close`,
    with the training run, or when Python ends; if the process is killed, it stays.  Raises OSError
    if there is no space.

    Examples
    --------
    >>> from functools import partial
    >>> from parallel import DiskOffload, Recipe
    >>> recipe = Recipe(offload=partial(DiskOffload, "/scratch"))
    """

    COLUMNS: ClassVar[tuple[str, ...]] = (*DEVICE_COLUMNS, READ, WRITTEN)

    def __init__(self, folder: str | Path, memory: MemoryTracker, rank: int) -> None:
        super().__init__(memory, rank)
        self.folder, self._remove = make_folder(self, folder, rank)

    def close(self) -> None:
        """Remove the files.  Training can continue: the mapped memory stays valid."""
        self._remove()

    def _zeros(self, name: str, num_elements: int, dtype: np.dtype[Any]) -> Array:
        if num_elements == 0:  # an empty file cannot be mapped
            return super()._zeros(name, num_elements, dtype)
        path = self.folder / quote(name, safe="")
        with path.open("xb") as file:
            # Reserve the space now: a full disk at a later write would kill the process.
            os.posix_fallocate(file.fileno(), 0, num_elements * dtype.itemsize)
        return np.memmap(path, dtype, "r+", shape=(num_elements,))

    def _before_read(self, arrays: list[Array]) -> None:
        self.moved[READ] += sum(x.nbytes for x in arrays)

    def _after_write(self, arrays: list[Array]) -> None:
        self.moved[WRITTEN] += sum(x.nbytes for x in arrays)
        for x in arrays:
            if x.size:
                x.flush()
                x.base.madvise(mmap.MADV_DONTNEED)


def make_folder(
    owner: object, folder: str | Path, rank: int
) -> tuple[Path, weakref.finalize[..., Any]]:
    """Return a new directory of this `rank` in `folder`, and a function that removes it.

    It is also removed with its `owner`, or when Python ends.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"rank{rank}-", dir=folder))
    return made, weakref.finalize(owner, shutil.rmtree, made, ignore_errors=True)


# Formulas


def bytes_moved_by_update(
    num_shard_elements: int, dtype: np.dtype[Any], num_states: int = 2
) -> dict[str, int]:
    """Return the bytes that one update moves, by column, where the offload has this column."""
    parameters = num_shard_elements * dtype.itemsize
    files = num_shard_elements * master_dtype(dtype).itemsize * (1 + num_states)
    return {TO_HOST: parameters, TO_DEVICE: parameters, READ: files, WRITTEN: files}


def bytes_moved_by_load(num_shard_elements: int, dtype: np.dtype[Any]) -> dict[str, int]:
    """Return the bytes that one `Offload.load` moves, by column."""
    parameters = num_shard_elements * dtype.itemsize
    masters = num_shard_elements * master_dtype(dtype).itemsize
    return {TO_HOST: parameters, TO_DEVICE: 0, READ: 0, WRITTEN: masters}
