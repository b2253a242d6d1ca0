"""Where updates are made: on the device, or where there is more room, in host memory or on disk.

A `Place` keeps master copies of what a rank updates, and the optimizer's states, and updates them
where they are.  Elsewhere than on the device a unit's gradient is brought there, and its new
parameters are sent back, before the next unit's turn comes.

    Recipe(place=Host)                        # ZeRO-Offload: Ren et al. 2021
    Recipe(place=partial(Disk, "/scratch"))   # ZeRO-Infinity: Rajbhandari et al. 2021

Of n elements that a rank updates (Psi, or its part Psi/N), with w bytes each, W bytes in the dtype
of updates, and S optimizer states, an update moves

| column          | places     | bytes       |
|-----------------|------------|-------------|
| to host         | Host, Disk | n w         |
| to device       | Host, Disk | n w         |
| read from disk  | Disk       | n W (1 + S) |
| written to disk | Disk       | n W (1 + S) |

and when masters are made, n w go to the host and n W to the disk.  NumPy's arrays are in host
memory already: nothing is moved to and from a device then, and both columns say 0.  What the disk's
columns count is read and written through the operating system, which may still have it in memory.
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
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from urllib.parse import quote

import numpy as np

from parallel.memory import Memory, num_own
from parallel.nn import Array
from parallel.optim import Optimizer, zeros_like
from parallel.precision import master_dtype

if TYPE_CHECKING:
    from parallel.strategy import Strategy

TO_HOST, TO_DEVICE = CROSSING = "to host", "to device"
READ, WRITTEN = "read from disk", "written to disk"


class Place(Protocol):
    """Where a rank updates.  Each strategy makes its own, of its memory and rank.

    `memory`: counts what is kept there: the strategy's own memory if that is on the device, else
    one apart, with the same categories.  `moved`: the bytes so far, by `COLUMNS`.  `num_loads`: how
    often masters were made what the parameters are.  `is_crossing`: whether the parameters are in
    a device's memory and the masters are not.
    """

    COLUMNS: ClassVar[tuple[str, ...]]
    memory: Memory
    moved: Counter[str]
    num_loads: int
    is_crossing: bool

    def masters_of(self, owned: Mapping[str, Array], dtype: np.dtype[Any]) -> Mapping[str, Array]:
        """What is to be updated in place of `owned`, flat arrays by unit, which are remembered."""

    def zeros(self, master: Array) -> Array:
        """A new state of the optimizer for one of these."""

    def load(self) -> None:
        """Make the masters what `owned` is by now, for somebody else has changed it."""

    def update(self, optimizer: Optimizer, gradients: Mapping[str, Array], factor: float) -> None:
        """One step over the masters, which `owned` then follows in all units that had gradients."""


class Device:
    """Where the parameters are.  The masters are `owned` itself, unless dtypes differ."""

    COLUMNS: ClassVar[tuple[str, ...]] = ()
    is_crossing = False

    def __init__(self, memory: Memory, rank: int) -> None:
        self.memory, self.moved, self.num_loads = memory, Counter[str](), 0

    def masters_of(self, owned: Mapping[str, Array], dtype: np.dtype[Any]) -> Mapping[str, Array]:
        self.owned = self.masters = owned
        if any(x.dtype != dtype for x in owned.values()):
            copies = {unit: x.astype(dtype) for unit, x in owned.items()}
            self.masters = self.memory.count("master", copies)
        return self.masters

    def zeros(self, master: Array) -> Array:
        return self.memory.count("optimizer", zeros_like(master))

    def load(self) -> None:
        self.num_loads += 1
        if self.masters is not self.owned:
            for unit, master in self.masters.items():
                master[...] = self.owned[unit]

    def update(self, optimizer: Optimizer, gradients: Mapping[str, Array], factor: float) -> None:
        optimizer.step(gradients, factor)
        if self.masters is not self.owned:
            for unit in gradients:
                self.owned[unit][...] = self.masters[unit]


class Host:
    """Host memory; updates are NumPy's.

    To and from a device everything goes through one buffer, as large as the largest part of a unit
    that this rank updates.  A device's arrays need CuPy's `get(out=)` and `set`.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = CROSSING
    is_crossing = False  # until a device's arrays have been seen

    def __init__(self, memory: Memory, rank: int) -> None:
        self.memory, self.num_loads = Memory(), 0
        self.moved = Counter(dict.fromkeys(self.COLUMNS, 0))
        self._kept: dict[str, list[Array]] = {}  # of each unit: the master, then its states

    def masters_of(self, owned: Mapping[str, Array], dtype: np.dtype[Any]) -> Mapping[str, Array]:
        self.owned = owned
        self.is_crossing = not all(isinstance(x, np.ndarray) for x in owned.values())
        if self.is_crossing:
            largest = max(owned.values(), key=lambda x: int(x.shape[0]))
            self._buffer = self.memory.count("buffers", np.empty(largest.shape[0], largest.dtype))
        self.masters = {unit: self._new("master", unit, x, dtype) for unit, x in owned.items()}
        self.load()
        return self.masters

    def zeros(self, master: Array) -> Array:
        unit = next(unit for unit, x in self.masters.items() if x is master)
        return self._new("optimizer", unit, master, master.dtype)

    def _new(self, category: str, unit: str, like: Array, dtype: np.dtype[Any]) -> Array:
        kept = self._kept.setdefault(unit, [])
        name = f"{unit}.state{len(kept)}" if kept else f"{unit}.master"
        kept.append(self.memory.count(category, self._zeros(name, like.shape[0], dtype)))
        return kept[-1]

    def _zeros(self, name: str, num_elements: int, dtype: np.dtype[Any]) -> Array:
        return np.zeros(num_elements, dtype)

    def load(self) -> None:
        self.num_loads += 1
        for unit, master in self.masters.items():
            master[...] = self._on_host(self.owned[unit])
            self._end([master])

    def update(self, optimizer: Optimizer, gradients: Mapping[str, Array], factor: float) -> None:
        optimizer.step(self._in_turn(gradients), factor)

    def _in_turn(self, gradients: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """Each unit's gradient on the host; whoever asks for the next one has updated this one."""
        for unit, gradient in gradients.items():
            self._begin(self._kept[unit])
            yield unit, self._on_host(gradient)
            self._send_back(self.masters[unit], self.owned[unit])
            self._end(self._kept[unit])

    def _begin(self, arrays: list[Array]) -> None:
        """These are about to be read."""

    def _end(self, arrays: list[Array]) -> None:
        """These have been written, and are not needed before the next update."""

    def _on_host(self, x: Array) -> Array:
        """`x`; of a device's a copy, which is good until anything else comes or goes."""
        if not self.is_crossing:
            return x
        there = self._buffer[: x.shape[0]]
        if there.size:
            x.get(out=there)
        self.moved[TO_HOST] += there.nbytes
        return there

    def _send_back(self, master: Array, x: Array) -> None:
        """Make `x` what the master is, rounded on the host."""
        if not self.is_crossing:
            x[...] = master
            return
        there = self._buffer[: x.shape[0]]
        there[...] = master
        if there.size:
            x.set(there)
        self.moved[TO_DEVICE] += there.nbytes


class Disk(Host):
    """A file of each unit and state, in a directory of this rank's own, which is made in `folder`.

    They are mapped into memory.  As soon as a unit has been updated its files are written to the
    disk and no longer held by this process, which so holds one unit's at most.  The directory is
    removed by `close`, or with the strategy, or when Python ends; who is killed leaves it.  OSError
    if there is no room.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = (*CROSSING, READ, WRITTEN)

    def __init__(self, folder: str | Path, memory: Memory, rank: int) -> None:
        super().__init__(memory, rank)
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"rank{rank}-", dir=folder))
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def close(self) -> None:
        """Remove the files.  Training can go on, on what has no names any longer."""
        self._remove()

    def _zeros(self, name: str, num_elements: int, dtype: np.dtype[Any]) -> Array:
        if num_elements == 0:  # nothing cannot be mapped
            return super()._zeros(name, num_elements, dtype)
        path = self.folder / quote(name, safe="")
        with path.open("xb") as file:
            # All of it now: to find the disk full when it is written to would be the process's end.
            os.posix_fallocate(file.fileno(), 0, num_elements * dtype.itemsize)
        return np.memmap(path, dtype, "r+", shape=(num_elements,))

    def _begin(self, arrays: list[Array]) -> None:
        self.moved[READ] += sum(x.nbytes for x in arrays)

    def _end(self, arrays: list[Array]) -> None:
        self.moved[WRITTEN] += sum(x.nbytes for x in arrays)
        for x in arrays:
            if x.size:
                x.flush()
                x.base.madvise(mmap.MADV_DONTNEED)


# By formula


def moved_by_update(own: int, dtype: np.dtype[Any], num_states: int = 2) -> dict[str, int]:
    """What one update of `own` elements moves in each column, at a place that has it."""
    parameters, files = own * dtype.itemsize, own * master_dtype(dtype).itemsize * (1 + num_states)
    return {TO_HOST: parameters, TO_DEVICE: parameters, READ: files, WRITTEN: files}


def moved_by_load(own: int, dtype: np.dtype[Any]) -> dict[str, int]:
    """What one load moves, with which masters begin."""
    parameters, masters = own * dtype.itemsize, own * master_dtype(dtype).itemsize
    return {TO_HOST: parameters, TO_DEVICE: 0, READ: 0, WRITTEN: masters}


def predicted_moves(strategy: Strategy, updates: int) -> dict[str, int]:
    """`strategy.place.moved` after so many updates, if all were of all units."""
    place, own = strategy.place, num_own(strategy)
    update = moved_by_update(own, strategy.dtype, len(strategy.optimizer.STATES))
    load = moved_by_load(own, strategy.dtype)
    moved = {x: updates * update[x] + place.num_loads * load[x] for x in place.COLUMNS}
    return {x: 0 if x in CROSSING and not place.is_crossing else n for x, n in moved.items()}
