"""Read a checkpoint: check all of it, then read the boxes that a rank keeps."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
from array_api_compat import array_namespace

from parallel.checkpoint.index import Index, layout_of
from parallel.nn import Array
from parallel.optim import master_dtype
from parallel.placement import Box, pieces_of
from parallel.runtime import Trainer

METADATA_FILE = "checkpoint.json"
VALUES = "values"  # what is saved of a parameter in addition to the states of the optimizer


class Saved(NamedTuple):
    """A box in a file: ``data[...]`` reads it."""

    box: Box
    data: Any


class Checkpoint:
    """The checkpoint in a directory; ValueError or OSError if there is none that can be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / METADATA_FILE).is_file():
            raise ValueError(f"there is no checkpoint in {path}")
        with reading(path / METADATA_FILE):
            self.index = Index.from_json((path / METADATA_FILE).read_text())
        name = re.fullmatch(r"step-(\d+)", path.name)
        if name is not None and int(name[1]) != self.index.step:
            raise ValueError(f"{path.name} contains step {self.index.step}")
        self.boxes: dict[str, list[Saved]] = {}
        self.hook: list[dict[str, Any]] = []  # of each rank that saved
        for file in self.index.files:
            self._open(path / file)

    def _open(self, path: Path) -> None:
        """Register the boxes in a file; this reads its header only."""
        with reading(path):
            file: Any = safetensors.safe_open(path, framework="numpy")
            boxes = json.loads((file.metadata() or {}).get("boxes", "{}"))
        if boxes.get("step") != self.index.step:
            raise ValueError(f"{path.name} is not of step {self.index.step}")
        keys = set(file.keys())
        for key, start in boxes["starts"].items():
            if key not in keys:
                raise ValueError(f"{path.name} has no tensor {key!r}")
            data = file.get_slice(key)
            box = Box(tuple(start), tuple(data.get_shape()))
            self.boxes.setdefault(key.partition("@")[0], []).append(Saved(box, data))
        names = sorted(key for key in keys if key.startswith("hook/"))
        self.hook.append({name.removeprefix("hook/"): file.get_slice(name) for name in names})

    # Before anything is changed

    def check(self, trainer: Trainer) -> None:
        """Raise ValueError unless the layout is the trainer's and each element exists once."""
        for what, expected in layout_of(trainer, trainer.optimizer.states).items():
            saved_layout = self.index.layout.get(what, [])
            for saved, wanted in zip_longest(saved_layout, expected, fillvalue="nothing"):
                if saved != wanted:
                    both = f"{saved} in the checkpoint, but {wanted} in the strategy"
                    raise ValueError(f"{what}: {both}")
        dtype = f"F{8 * master_dtype(trainer.dtype).itemsize}"
        for unit, specs in trainer.model.units.items():
            for key, spec in specs.items():
                for kind in (VALUES, *trainer.optimizer.states):
                    self._check(f"{unit}.{key}/{kind}", spec.shape or (1,), dtype)

    def _check(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        times, whole = np.zeros(shape, np.uint8), Box((0,) * len(shape), shape)
        for box, data in self.boxes.get(name, []):
            if data.get_dtype() != dtype:
                raise ValueError(f"{name} is {data.get_dtype()}, not {dtype}")
            if len(box.start) != len(shape) or whole.overlap(box) != box:
                raise ValueError(f"{name} has a box {box} outside its shape {shape}")
            times[box.slices] += 1
        for wrong, fault in ((times > 1, "occur twice"), (times < 1, "are missing")):
            if wrong.any():
                raise ValueError(f"{int(wrong.sum())} elements of {name} {fault}")

    def check_files(self, rank: int, size: int) -> None:
        """Raise ValueError if a file has changed.  Each of `size` ranks checks some of them."""
        for name, digest in list(self.index.files.items())[rank::size]:
            if hashlib.sha256((self.path / name).read_bytes()).hexdigest() != digest:
                raise ValueError(f"{name} was changed after it was written: its digest is another")

    # Read

    def fill(self, trainer: Trainer) -> None:
        """Read what this rank keeps into its arrays, and nothing else."""
        for unit in trainer.model.units:
            stored, shard = trainer.stored_slice(unit), trainer.shard_slice(unit)
            self._read(trainer, unit, VALUES, stored, trainer.parameters[unit])
            self._read(trainer, unit, VALUES, shard, trainer.masters[unit])
            for kind, arrays in trainer.optimizer.states.items():
                self._read(trainer, unit, kind, shard, arrays[unit])
        self._fill_hook(trainer)
        trainer.optimizer.steps = self.index.optimizer["steps"]
        trainer.num_skipped = self.index.num_skipped
        vars(trainer.loss_scale).update(self.index.loss_scale)

    def _read(self, trainer: Trainer, unit: str, kind: str, part: slice, into: Array) -> None:
        """Read a part of a unit into an array, in its dtype."""
        xp = array_namespace(into)
        for name, box, flat in pieces_of(trainer.model.boxes(unit), part):
            target = into[flat].reshape(box.shape)
            for saved, data in self.boxes[f"{unit}.{name}/{kind}"]:
                both = box.overlap(saved)
                if both is not None:
                    values = data[both.within(saved).slices]
                    target[both.within(box).slices] = xp.asarray(values, dtype=into.dtype)

    def _fill_hook(self, trainer: Trainer) -> None:
        """Read the state of the hook; see `HookState` for other numbers of ranks."""
        equal, summed, own = trainer.sharding.reduction.state(trainer)
        found = {name: self.hook[0][name][:] for name in equal}
        if len(self.hook) == trainer.size:
            found |= {name: self.hook[trainer.rank][name][:] for name in [*summed, *own]}
        else:
            for name in summed:
                total = sum((each[name][:] for each in self.hook), np.zeros(1))
                found[name] = total * (trainer.rank == 0)
        for name, x in {**equal, **summed, **own}.items():
            if name in found:
                x[...] = array_namespace(x).asarray(found[name], dtype=x.dtype)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ValueError with the file's name if its contents cannot be read."""
    try:
        yield
    except (ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path.name} is broken: {error}") from error
