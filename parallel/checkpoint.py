"""Checkpoints: a training run on disk, written in parts and read by any number of ranks.

ROOT/step-00000100/ holds `checkpoint.json` and a file of every rank that saved.  Together they hold
for each unit of the model a flat array of the values that updates are computed in, and one of each
state of the optimizer.  A rank writes the elements that it updates, or its even part of them where
others update the same: each is written once, and any strategy on any number of ranks can go on from
what any other saved.

Ranks write into a directory of another name, which is renamed when all is on the disk: a checkpoint
is there as a whole or not at all, whoever dies meanwhile.  ROOT must be on a file system that all
ranks share; one job at a time saves there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from array_api_compat import array_namespace

from parallel.agreement import REPORT, together
from parallel.nn import Array, on_host
from parallel.precision import master_dtype
from parallel.shards import length, span
from parallel.strategy import Strategy
from parallel.traffic import PredictedCall

ABOUT = "checkpoint.json"
VALUES = "values"  # what is kept of a unit beside the states of the optimizer
UNFINISHED = ".unfinished-"  # begins the name of what is no checkpoint yet, or no longer
STAGES = {"save": 3, "load": 2}


class SaveFailed(OSError):  # noqa: N818 - as the others of its kind are named
    """A checkpoint could not be written.  The message says on which ranks, and why."""


class LoadFailed(ValueError):  # noqa: N818
    """A checkpoint is missing, broken, or of something else.  The message says how."""


def save(strategy: Strategy, root: str | Path, step: int, keep: int | None = None) -> Path:
    """Save what is needed to go on after `step` steps; the checkpoint's directory.

    All ranks call this, and it is in place when any returns.  `keep`: remove all but the last so
    many.  SaveFailed on all ranks if one fails, or if this step is there already; what was there
    stays.  What a communication hook remembers is not saved.
    """
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"cannot save step {step} and keep {keep}: at least 0 and 1")
    place = place_of(root, step)
    unfinished = place.with_name(UNFINISHED + place.name)
    doing, is_first = f"saving step {step}", strategy.rank == 0
    try:
        with together(strategy.comm, strategy.phase, "save", doing, SaveFailed):
            if is_first:
                prepare(unfinished, place)
        with together(strategy.comm, strategy.phase, "save", doing, SaveFailed):
            write_part(strategy, unfinished, step)
        with together(strategy.comm, strategy.phase, "save", doing, SaveFailed):
            if is_first:
                finish(strategy, unfinished, place, step)
                forget(place, keep)
    except SaveFailed:
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)  # the disk may be full
        raise
    return place


def load(strategy: Strategy, path: str | Path) -> int:
    """Go on from the checkpoint in this directory, filling arrays in place; the steps done.

    All ranks call this, and `resume` of the strategy or `start` before it.  LoadFailed on all
    ranks, with nothing changed, if one finds it incomplete, or of another model, dtype or kind of
    optimizer.  The optimizer's rates and the like stay those of the recipe.
    """
    path = Path(path)
    with together(strategy.comm, strategy.phase, "load", f"loading {path.name}", LoadFailed):
        checkpoint = Checkpoint(path)
        checkpoint.check(strategy)
    with together(strategy.comm, strategy.phase, "load", f"loading {path.name}", LoadFailed):
        checkpoint.fill(strategy)
    return int(checkpoint.about["step"])


def place_of(root: str | Path, step: int) -> Path:
    """The directory of the checkpoint after so many steps."""
    return Path(root, f"step-{step:08d}")


def latest(root: str | Path) -> Path | None:
    """The directory of the checkpoint after the most steps; None if there is none."""
    return next(reversed(complete(Path(root))), None)


def traffic(strategy: Strategy, phase: str = "save") -> list[PredictedCall]:
    """What one "save" or "load" sends: after each of its stages every rank says how it went."""
    nbytes = REPORT.itemsize * strategy.size
    return [PredictedCall(phase, "all_gather", "ring", nbytes, STAGES[phase])]


# Writing


def prepare(unfinished: Path, place: Path) -> None:
    """A new directory; what those left who died while they saved or removed is removed."""
    if place.exists():
        raise FileExistsError(f"this step has been saved already, in {place}")
    for left in place.parent.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left)
    unfinished.mkdir(parents=True)


def write_part(strategy: Strategy, folder: Path, step: int) -> None:
    """This rank's elements, and at which element of the unit they begin, to the disk itself."""
    which, replicas = strategy.replicas
    about, tensors = {"step": str(step)}, {}
    for unit in strategy.model.units:
        own = strategy.own(unit)
        part = span(length(own), replicas, which)
        for name, flat in arrays_of(strategy, unit).items():
            about[name] = str(own.start + part.start)
            tensors[name] = on_host(flat[part])
    file = folder / file_name(strategy.rank, strategy.size)
    library().numpy.save_file(tensors, file, metadata=about)
    sync(file)


def finish(strategy: Strategy, unfinished: Path, place: Path, step: int) -> None:
    """Add what all ranks know, and put in place what has been found complete."""
    optimizer, scale = strategy.optimizer, strategy.loss_scale
    options = {k: x for k, x in vars(optimizer).items() if isinstance(x, int | float | tuple)}
    about = layout_of(strategy) | {
        "step": step, "ranks": strategy.size, "num_skipped": strategy.num_skipped,
        "loss_scale": {"value": scale.value, "num_good": scale.num_good},
        "optimizer": {"class": type(optimizer).__name__, **options},
    }  # fmt: skip
    (unfinished / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    sync(unfinished / ABOUT)
    Checkpoint(unfinished).check(strategy)
    sync(unfinished)
    unfinished.rename(place)
    sync(place.parent)


def forget(place: Path, keep: int | None) -> None:
    """Remove all checkpoints but this and the last `keep` - 1 others: the name first, at once."""
    others = [other for other in complete(place.parent) if other != place]
    for old in [] if keep is None else others[: len(others) + 1 - keep]:
        shutil.rmtree(old.rename(old.with_name(UNFINISHED + old.name)))


def sync(path: Path) -> None:
    """Return when a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading


class Part(NamedTuple):
    """Elements `start` to `stop` of an array, in a file: `data[:]` reads them."""

    start: int
    stop: int
    data: Any


class Checkpoint:
    """The one in a directory.  ValueError or OSError if there is none, or if a file is broken."""

    def __init__(self, path: Path) -> None:
        if not (path / ABOUT).is_file():
            raise ValueError(f"there is no checkpoint in {path}")
        with reading(path / ABOUT):
            self.about = json.loads((path / ABOUT).read_text())
        self.parts: dict[str, list[Part]] = {}
        for rank in range(self.about["ranks"]):
            self._open(path / file_name(rank, self.about["ranks"]))

    def _open(self, path: Path) -> None:
        """Note which parts a file has.  Nothing but its header is read."""
        with reading(path):
            file = library().safe_open(path, framework="numpy")
        about = file.metadata() or {}
        if about.pop("step", None) != str(self.about["step"]):
            raise ValueError(f"{path.name} is not of step {self.about['step']}")
        for name, start in about.items():
            data = file.get_slice(name)
            part = Part(int(start), int(start) + data.get_shape()[0], data)
            self.parts.setdefault(name, []).append(part)

    def check(self, strategy: Strategy) -> None:
        """ValueError unless this is what the strategy trains, and each element is there once."""
        for what, ours in layout_of(strategy).items():
            for saved, our in zip_longest(self.about[what], ours, fillvalue="nothing"):
                if saved != our:
                    raise ValueError(f"{what}: {saved} in the checkpoint, {our} here")
        for unit, size in strategy.model.sizes.items():
            for name in arrays_of(strategy, unit):
                self._check(name, size, f"F{8 * master_dtype(strategy.dtype).itemsize}")

    def _check(self, name: str, size: int, dtype: str) -> None:
        parts = sorted(self.parts.get(name, []), key=lambda part: part[:2])
        for part in parts:
            if part.data.get_dtype() != dtype:
                raise ValueError(f"{name} is {part.data.get_dtype()}, not {dtype}")
        stops, starts = [0, *(x.stop for x in parts)], [*(x.start for x in parts), size]
        for stop, start in zip(stops, starts, strict=True):
            if start != stop:
                fault = "missing" if start > stop else "there twice"
                low, high = sorted([start, stop])
                raise ValueError(f"elements {low} to {high} of {name} are {fault}")

    def fill(self, strategy: Strategy) -> None:
        """Read what this rank keeps, and nothing else."""
        for unit in strategy.model.units:
            self._read(f"{unit}.{VALUES}", strategy.held(unit), strategy.parameters[unit])
            for name, flat in arrays_of(strategy, unit).items():
                self._read(name, strategy.own(unit), flat)
        strategy.optimizer.steps = self.about["optimizer"]["steps"]
        strategy.num_skipped = self.about["num_skipped"]
        vars(strategy.loss_scale).update(self.about["loss_scale"])

    def _read(self, name: str, wanted: slice, into: Array) -> None:
        """These elements of an array, in the dtype of `into`."""
        xp = array_namespace(into)
        for first, last, data in self.parts[name]:
            start, stop = max(first, wanted.start), min(last, wanted.stop)
            if start < stop:
                piece = into[start - wanted.start : stop - wanted.start]
                piece[...] = xp.asarray(data[start - first : stop - first], dtype=into.dtype)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """ValueError with the file's name if what is in it cannot be read."""
    try:
        yield
    except (ValueError, library().SafetensorError) as error:
        raise ValueError(f"{path.name} is broken: {error}") from error


def complete(root: Path) -> list[Path]:
    """The checkpoints in `root`, by their steps."""
    steps = [p for p in root.glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return sorted((p for p in steps if (p / ABOUT).is_file()), key=steps_of)


def steps_of(path: Path) -> int:
    """How many steps a checkpoint has done."""
    return int(path.name.removeprefix("step-"))


# What both need


def arrays_of(strategy: Strategy, unit: str) -> dict[str, Array]:
    """What this rank updates of a unit, by the names under which it is saved."""
    kinds: dict[str, Mapping[str, Array]] = {VALUES: strategy.masters, **strategy.optimizer.states}
    return {f"{unit}.{kind}": flats[unit] for kind, flats in kinds.items()}


def layout_of(strategy: Strategy) -> dict[str, list[Any]]:
    """What must be the same in who saves and who loads, as JSON has it."""
    units = strategy.model.units.items()
    return {
        "dtype": [strategy.dtype.name],
        "states": list(strategy.optimizer.states),
        "shapes": [[f"{u}.{k}", list(s.shape)] for u, specs in units for k, s in specs.items()],
    }


def file_name(rank: int, ranks: int) -> str:
    """Of a rank's part."""
    return f"rank-{rank}-of-{ranks}.safetensors"


def library() -> Any:
    """Safetensors, which only who saves or loads needs."""
    try:
        import safetensors.numpy  # noqa: PLC0415
    except ImportError as missing:
        raise ImportError("checkpoints need safetensors: pip install safetensors") from missing
    return safetensors
