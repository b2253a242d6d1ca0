"""What a checkpoint contains: all of it is checked before a trainer is changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import reprlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from parallel.mesh import Box, pieces_of
from parallel.nn import Array, Model, namespace_of
from parallel.optim import dtype_of, master_dtype
from parallel.run import Trainer

METADATA_FILE = "checkpoint.json"
VALUES = "values"  # what is saved of a parameter in addition to the states of the optimizer
MAX_STEPS = 2**53  # what JSON numbers represent exactly everywhere


def file_name(rank: int, num_ranks: int) -> str:
    """Return the name of the file of a rank's part."""
    return f"rank-{rank}-of-{num_ranks}.safetensors"


class Index(NamedTuple):
    """The contents of ``checkpoint.json``."""

    step: int  # the number of steps done
    num_skipped: int
    files: dict[str, str]  # the SHA-256 of the file of each rank that saved
    layout: dict[str, list[Any]]  # see `layout_of`
    loss_scale: dict[str, Any]  # its value, and the number of updates since it changed
    optimizer: dict[str, Any]  # the class, the options and the number of updates
    layers: dict[str, list[float]]  # what changes in layers and is no parameter, by name

    @classmethod
    def of(cls, trainer: Trainer, step: int, digests: list[str]) -> Index:
        """Return the index of a checkpoint of `trainer`, from the digests of all ranks' files."""
        optimizer, scale = trainer.optimizer, trainer.loss_scale
        options = {k: x for k, x in vars(optimizer).items() if isinstance(x, int | float | tuple)}
        files = {file_name(r, trainer.size): digest for r, digest in enumerate(digests)}
        return cls(
            step,
            trainer.updates.num_skipped,
            files,
            layout_of(trainer),
            {"value": float(scale.value), "num_good": scale.num_good},
            {"class": type(optimizer).__name__, **options},
            {name: layer.state() for name, layer in trainer.model.counting_layers.items()},
        )

    def to_json(self) -> str:
        """Return the text of the file, which contains its own digest."""
        fields = self._asdict()
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
        return json.dumps(fields | {"digest": digest}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Index:
        """Return the index in the text of a file.  Raise ValueError unless all of it is valid."""
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("it contains no JSON object")
        if wrong := sorted(fields.keys() ^ {*cls._fields, "digest"}):
            which = "an unknown" if wrong[0] in fields else "no"
            raise ValueError(f"it has {which} field {shown(wrong[0])!r}")
        index = cls(*(fields[name] for name in cls._fields))
        if text != index.to_json():
            raise ValueError("it was changed after it was written: its digest or form is another")
        index.check()
        return index

    def check(self) -> None:
        """Raise ValueError if a field is impossible."""
        for name in ("files", "layout", "loss_scale", "optimizer", "layers"):
            if not isinstance(value := getattr(self, name), dict):
                raise ValueError(f"{name} is {shown(value)}: it must be an object")
        counts = {
            "step": self.step,
            "num_skipped": self.num_skipped,
            "optimizer.steps": self.optimizer.get("steps"),
            "loss_scale.num_good": self.loss_scale.get("num_good"),
        }
        for name, x in counts.items():
            if not isinstance(x, int) or isinstance(x, bool) or not 0 <= x <= MAX_STEPS:
                raise ValueError(f"{name} is {shown(x)!r}: it must be an integer of at least 0")
        value = self.loss_scale.get("value")
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise ValueError(
                f"loss_scale.value is {shown(value)}: it must be a finite number above 0"
            )
        names = [file_name(rank, len(self.files)) for rank in range(len(self.files))]
        if list(self.files) != names:
            raise ValueError(f"files are {shown(list(self.files))}: they must be {shown(names)}")
        self._check_lists()

    def _check_lists(self) -> None:
        """Raise ValueError if the layout or the state of a layer is impossible."""
        for name, boxes in self.layout.items():
            if not isinstance(boxes, list):
                raise ValueError(f"layout.{name} is {shown(boxes)}: it must be a list")
        dtype = self.layout.get("dtype", [])
        if len(dtype) != 1 or not isinstance(dtype[0], str):
            raise ValueError(f"layout.dtype is {shown(dtype)}: it must be one name")
        for name, state in self.layers.items():
            if not isinstance(state, list) or not all(map(_is_finite, state)):
                raise ValueError(
                    f"layers.{shown(name)} is {shown(state)}: it must be finite numbers"
                )


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # type: ignore[arg-type]


def layout_of(trainer: Trainer) -> dict[str, list[Any]]:
    """Return what must be equal when a checkpoint is saved and loaded, as JSON represents it."""
    hook = trainer.sharding.reduction.state(trainer.optimizer)
    return {
        "dtype": [trainer.view.dtype.name],
        "states": list(trainer.optimizer.states),
        "shapes": shapes_of(trainer.model),
        "hook": [name for arrays in hook for name in arrays],
        "layers": [[n, len(x.state())] for n, x in trainer.model.counting_layers.items()],
    }


def shapes_of(model: Model) -> list[list[Any]]:
    """Return the names and shapes of the parameters of a model, as JSON represents them."""
    return [[name, list(spec.shape)] for name, spec in model.specs.items()]


def checked_boxes(value: object) -> tuple[object, dict[str, list[int]]]:
    """Return the step of a file, and where each of its boxes begins.

    Raises ValueError if `value`, which the file contains, says something else.
    """
    if not isinstance(value, dict) or set(value) != {"step", "starts"}:
        raise ValueError("its boxes must have a step and starts")
    if not isinstance(value["starts"], dict):
        raise ValueError("the starts of its boxes must be an object")
    for key, start in value["starts"].items():
        if not isinstance(start, list) or not all(type(x) is int and x >= 0 for x in start):
            raise ValueError(
                f"the box {shown(key)} begins at {shown(start)}, which is no list of indices"
            )
    return value["step"], value["starts"]


def first_difference(saved: list[Any], wanted: list[Any]) -> str:
    """Return the first entries that differ, in words; `saved` is in a checkpoint."""
    pairs = [*zip_longest(saved, wanted, fillvalue="nothing"), (saved, wanted)]
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    return f"{shown(one)} in the checkpoint, but {shown(other)}"


def shown(value: object) -> str:
    """Return a value of a file as an error message shows it: printable and short."""
    is_name = isinstance(value, str) and value.isprintable() and len(value) < 80
    return str(value) if is_name else reprlib.repr(value)


class Checkpoint:
    """The checkpoint in a directory.  Raises ValueError or OSError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / METADATA_FILE).is_file():
            raise ValueError(f"there is no checkpoint in {path}")
        with reading(path / METADATA_FILE):
            self.index = Index.from_json((path / METADATA_FILE).read_bytes().decode())
        name = re.fullmatch(r"step-(\d+)", path.name)
        if name is not None and int(name[1]) != self.index.step:
            raise ValueError(f"{path.name} contains step {self.index.step}")
        self.boxes: dict[str, list[tuple[Box, Any]]] = {}  # `data[...]` reads elements of a box
        self.files = [self._open(path / file) for file in self.index.files]

    def _open(self, path: Path) -> Any:
        """Register the boxes in a file; this reads its header only."""
        with reading(path):
            file: Any = safetensors.safe_open(path, framework="numpy")
            boxes = json.loads((file.metadata() or {}).get("boxes", "{}"))
            step, starts = checked_boxes(boxes)
        if step != self.index.step:
            raise ValueError(f"{path.name} is not of step {self.index.step}")
        keys = set(file.keys())
        for key, start in starts.items():
            if key not in keys:
                raise ValueError(f"{path.name} has no tensor {shown(key)!r}")
            data = file.get_slice(key)
            box = Box(tuple(start), tuple(data.get_shape()))
            self.boxes.setdefault(key.partition("@")[0], []).append((box, data))
        return file

    def check(self, trainer: Trainer) -> None:
        """Raise ValueError unless the layout is the trainer's and each element exists once."""
        for what, wanted in layout_of(trainer).items():
            saved = self.index.layout.get(what, [])
            if saved != wanted:
                both = first_difference(saved, wanted)
                raise ValueError(f"{what}: {both} in the strategy")
        name = trainer.view.dtype.name
        if (value := self.index.loss_scale["value"]) != 1 and not trainer.loss_scale.is_dynamic:
            raise ValueError(f"loss_scale.value is {value!r}: it must be 1 in {name}")
        self._check_arrays(trainer.model, trainer.view.dtype, (VALUES, *trainer.optimizer.states))
        self._check_layers()
        with reading(self.path):
            hook = list(self._hook(trainer))
        for name, x, parts in hook:
            dtype = f"F{8 * x.dtype.itemsize}" if x.dtype.kind == "f" else None
            for part in parts:
                if (shape := part.get_shape()) != list(x.shape):
                    raise ValueError(f"{name} has the shape {shape}, not {list(x.shape)}")
                if dtype not in (None, part.get_dtype()):
                    raise ValueError(f"{name} is {part.get_dtype()}, not {dtype}")

    def check_values(self, model: Model) -> None:
        """Raise ValueError unless these are the parameters of a model, each element once."""
        if (saved := self.index.layout.get("shapes", [])) != (wanted := shapes_of(model)):
            raise ValueError(f"shapes: {first_difference(saved, wanted)} in the model")
        (dtype,) = self.index.layout["dtype"]
        self._check_arrays(model, dtype_of(dtype), (VALUES,))
        self._check_layers()

    def _check_arrays(self, model: Model, dtype: np.dtype[Any], kinds: tuple[str, ...]) -> None:
        name_of_dtype = f"F{8 * master_dtype(dtype).itemsize}"
        for name, shape in shapes_of(model):
            for kind in kinds:
                self._check(f"{name}/{kind}", tuple(shape) or (1,), name_of_dtype)

    def _check_layers(self) -> None:
        saved_layers = [[name, len(state)] for name, state in self.index.layers.items()]
        if saved_layers != self.index.layout.get("layers"):
            raise ValueError(f"layers are {shown(saved_layers)}, but the layout has others")

    def _check(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        is_covered, whole = np.zeros(shape, bool), Box((0,) * len(shape), shape)
        for box, data in self.boxes.get(name, []):
            if data.get_dtype() != dtype:
                raise ValueError(f"{name} is {data.get_dtype()}, not {dtype}")
            if len(box.start) != len(shape) or whole.overlap(box) != box:
                raise ValueError(f"{name} has a box {box} outside its shape {shape}")
            if twice := np.count_nonzero(is_covered[box.slices]):
                raise ValueError(f"{twice} elements of {name} occur twice")
            is_covered[box.slices] = True
        if missing := np.count_nonzero(~is_covered):
            raise ValueError(f"{missing} elements of {name} are missing")

    def check_files(self, rank: int, size: int) -> None:
        """Raise ValueError if a file has changed.  Each of `size` ranks checks some of them."""
        for name, digest in list(self.index.files.items())[rank::size]:
            if hashlib.sha256((self.path / name).read_bytes()).hexdigest() != digest:
                raise ValueError(f"{name} was changed after it was written: its digest is another")

    def fill(self, trainer: Trainer) -> None:
        """Read what this rank keeps into its arrays, and nothing else."""
        view = trainer.view
        for unit in view.unit_sizes:
            stored, shard = view.stored_slice(unit), view.shard_slice(unit)
            model = trainer.model
            self._read(model, unit, VALUES, stored, trainer.parameters[unit])
            self._read(model, unit, VALUES, shard, trainer.masters[unit])
            for kind, arrays in trainer.optimizer.states.items():
                self._read(model, unit, kind, shard, arrays[unit])
        for _, x, parts in self._hook(trainer):
            if 0 in x.shape:  # safetensors cannot read a slice of nothing
                continue
            values = [part[:] for part in parts]
            total = values[0] if len(values) == 1 else sum(values, np.zeros(1))
            x[...] = namespace_of(x).asarray(total, dtype=x.dtype)
        scale, saved = trainer.loss_scale, self.index.loss_scale
        scale.value, scale.num_good = saved["value"], saved["num_good"]
        trainer.optimizer.steps = self.index.optimizer["steps"]
        trainer.updates.num_skipped = self.index.num_skipped
        self._load_layers(trainer.model)

    def values(self, model: Model, dtype: np.dtype[Any]) -> dict[str, Array]:
        """Set the state of a model's layers, and return the parameters of this rank's part.

        The parameters are 1-d arrays of a `dtype`, by unit.
        """
        units = {unit: np.empty(size, dtype) for unit, size in model.unit_sizes.items()}
        for unit, x in units.items():
            self._read(model, unit, VALUES, slice(0, len(x)), x)
        self._load_layers(model)
        return units

    def _load_layers(self, model: Model) -> None:
        for name, layer in model.counting_layers.items():
            layer.load_state(self.index.layers[name])

    def _read(self, model: Model, unit: str, kind: str, part: slice, into: Array) -> None:
        """Read a part of a unit into an array, in its dtype."""
        xp = namespace_of(into)
        for name, box, flat in pieces_of(model.boxes(unit), part):
            target = into[flat].reshape(box.shape)
            for saved, data in self.boxes[f"{name}/{kind}"]:
                if (both := box.overlap(saved)) is not None:
                    values = data[both.within(saved).slices]
                    target[both.within(box).slices] = xp.asarray(values, dtype=into.dtype)

    def _hook(self, trainer: Trainer) -> Iterator[tuple[str, Array, list[Any]]]:
        """Yield each array of the hook, and the saved arrays to add up in it; see `HookState`."""
        equal, summed, own = trainer.sharding.reduction.state(trainer.optimizer)
        mine, first = self.files[trainer.rank : trainer.rank + 1], self.files[:1]
        if len(self.files) != trainer.size:
            mine, own = (self.files if trainer.rank == 0 else []), {}
        for arrays, files in ((equal, first), (summed, mine), (own, mine)):
            for name, x in arrays.items():
                yield name, x, [file.get_slice(f"hook/{name}") for file in files]


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ValueError with the file's name if its contents cannot be read."""
    try:
        yield
    except (ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path.name} is broken: {error}") from error
