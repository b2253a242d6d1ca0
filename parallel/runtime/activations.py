"""Where activations are between the forward and the backward pass of a layer.

What a layer saves is moved after its forward pass, and brought back before its backward pass: the
device keeps the activations of one layer at a time.  Rajbhandari et al. 2021 (ZeRO-Infinity).

    Recipe(offload_activations=HostActivations)
    Recipe(offload_activations=partial(DiskActivations, "/scratch"))

For A bytes that all layers save in a batch (`Model.activation_bytes`), a batch moves

| column                      | offload                            | bytes |
|-----------------------------|------------------------------------|-------|
| activations to host         | `HostActivations, DiskActivations` | A     |
| activations to device       | `HostActivations, DiskActivations` | A     |
| activations read from disk  | `DiskActivations`                  | A     |
| activations written to disk | `DiskActivations`                  | A     |

NumPy's arrays are in host memory already: `HostActivations` leaves them where they are, and
`DiskActivations` moves them only to and from the disk.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from parallel.accounts import MemoryTracker
from parallel.accounts.tracker import arrays_in
from parallel.nn import Array, Shape
from parallel.optim.offload import DiskOffload, make_folder

OFFLOADED = "activations, offloaded"  # the category of memory of what has been moved
TO_HOST, TO_DEVICE, READ, WRITTEN = (f"activations {column}" for column in DiskOffload.COLUMNS)


@dataclass(eq=False)
class Moved:
    """An array that has been moved, and its `place`: the array in host memory, or a file.

    It has a dtype and bytes, so that a `MemoryTracker` counts it.
    """

    place: Any
    shape: Shape
    dtype: np.dtype[Any]
    nbytes: int


class KeptActivations:
    """Leaves activations where they are.

    Parameters
    ----------
    memory : MemoryTracker
        Counts what is moved in the category "activations, offloaded".
    rank : int
        The rank; part of the names of files.
    xp : namespace
        The array namespace of the model.

    Attributes
    ----------
    columns : tuple of str
        What `moved` counts: nothing if nothing is moved.
    moved : Counter of str
        The bytes moved so far, by `columns`.
    """

    columns: tuple[str, ...] = ()

    def __init__(self, memory: MemoryTracker, rank: int, xp: Any) -> None:
        self.memory, self.xp, self.moved = memory, xp, Counter[str]()

    def put(self, saved: Any) -> Any:
        """Return `saved`, which a layer has saved, without the arrays that are moved."""
        return saved

    def take(self, kept: Any) -> Any:
        """Return what was moved to where it was; `kept` is what `put` returned."""
        return kept


class HostActivations(KeptActivations):
    """Moves activations from a device to host memory.

    An array that is in `saved` several times is moved once.  An array that several layers save is
    moved for each of them, and each view of an array is moved as an array of its own;
    `Model.activation_bytes` counts these once, so that the predictions are exact for models in
    which there are none, such as `parallel.gpt`.  What comes back is contiguous, in C order.  A
    device's arrays need CuPy's ``get(out=)`` and ``set``.  See `KeptActivations` for the methods
    and attributes.

    Parameters
    ----------
    memory, rank, xp
        As in `KeptActivations`.

    Examples
    --------
    >>> from parallel import HostActivations, Recipe
    >>> recipe = Recipe(offload_activations=HostActivations)
    """

    def __init__(self, memory: MemoryTracker, rank: int, xp: Any) -> None:
        super().__init__(memory, rank, xp)
        self.is_cross_device = not isinstance(xp.empty(0), np.ndarray)
        self.columns = (TO_HOST, TO_DEVICE) if self.is_cross_device else ()

    def put(self, saved: Any) -> Any:
        return replaced(saved, self._move) if self.columns else saved

    def take(self, kept: Any) -> Any:
        return replaced(kept, self._bring_back) if self.columns else kept

    def _move(self, x: Array) -> Moved:
        if self.is_cross_device:
            x = self._copy_to_host(x)
        return self.memory.track(OFFLOADED, Moved(x, x.shape, x.dtype, x.nbytes))

    def _copy_to_host(self, x: Array) -> Array:
        host = np.empty(x.shape, x.dtype)
        if host.size:
            x.get(out=host)
        self.moved[TO_HOST] += host.nbytes
        return host

    def _bring_back(self, moved: Moved) -> Array:
        return self._copy_to_device(moved.place) if self.is_cross_device else moved.place

    def _copy_to_device(self, host: Array) -> Array:
        x = self.xp.empty(host.shape, dtype=host.dtype)
        if host.size:
            x.set(host)
        self.moved[TO_DEVICE] += host.nbytes
        return x


class DiskActivations(HostActivations):
    """Moves activations to files, one for each array.

    The files are in a directory of this rank, which is created in `folder`.  Each is removed after
    backward.  The directory is removed by `close`, with the training run, or when Python ends; if
    the process is killed, it stays.  Raises OSError if there is no space.

    Parameters
    ----------
    folder : str or Path
    memory, rank, xp
        As in `KeptActivations`.

    Examples
    --------
    >>> from functools import partial
    >>> from parallel import DiskActivations, Recipe
    >>> recipe = Recipe(offload_activations=partial(DiskActivations, "/scratch"))
    """

    def __init__(self, folder: str | Path, memory: MemoryTracker, rank: int, xp: Any) -> None:
        super().__init__(memory, rank, xp)
        self.columns = (*self.columns, READ, WRITTEN)
        self.folder, self._remove = make_folder(self, folder, rank)
        self._numbers = count()

    def close(self) -> None:
        """Remove the files.  No step may follow."""
        self._remove()

    def _move(self, x: Array) -> Moved:
        moved = super()._move(x)
        host, moved.place = moved.place, self.folder / str(next(self._numbers))
        weakref.finalize(moved, moved.place.unlink, missing_ok=True)
        host.tofile(moved.place)
        self.moved[WRITTEN] += moved.nbytes
        return moved

    def _bring_back(self, moved: Moved) -> Array:
        host = np.fromfile(moved.place, np.uint8).view(moved.dtype).reshape(moved.shape)
        self.moved[READ] += moved.nbytes
        return super()._bring_back(replace(moved, place=host))


def replaced(held: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested lists, tuples and dicts with ``change(x)`` for each `x` of `arrays_in`.

    An array that is in `held` several times is changed once.
    """
    distinct = {id(x): x for x in arrays_in(held)}
    return with_new(held, {key: change(x) for key, x in distinct.items()})


def with_new(held: Any, new: Mapping[int, Any]) -> Any:
    """Return nested lists, tuples and dicts with `new` values of objects, given by `id`."""
    if isinstance(held, dict):
        return {key: with_new(x, new) for key, x in held.items()}
    if isinstance(held, list | tuple):
        items = [with_new(x, new) for x in held]
        return getattr(held, "_make", type(held))(items)  # a named tuple has _make
    return new.get(id(held), held)
