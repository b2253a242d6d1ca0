"""Checkpoints: save a training run, and continue it by any strategy on any number of ranks.

The directory ``ROOT/step-00000100`` contains ``checkpoint.json`` and one safetensors file of each
rank that saved.  Together they contain, for each unit of the model, a flat array of the values that
the optimizer updates and one of each of its states.  A rank writes the elements that it updates, or
an even part of them if other ranks update the same, so that each element is written once.

Ranks write to a directory of another name, which is renamed when all files are on the disk: a
checkpoint is complete or does not exist, even if ranks die while they save.  ROOT must be on a file
system that all ranks share, and only one job at a time may save there.
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

import safetensors.numpy
from array_api_compat import array_namespace

from parallel.agreement import REPORT, raise_on_all_ranks
from parallel.nn import Array, on_host
from parallel.precision import master_dtype
from parallel.shards import length, span
from parallel.strategy import Strategy
from parallel.traffic import PredictedCall

__all__ = [
    "LoadFailed", "SaveFailed", "checkpoint_path", "latest", "load", "save", "traffic",
]  # fmt: skip

METADATA_FILE = "checkpoint.json"
VALUES = "values"  # what is saved of a unit in addition to the states of the optimizer
UNFINISHED = ".unfinished-"  # prefix of a directory that is being written or removed
NUM_STAGES = {"save": 3, "load": 2}


class SaveFailed(OSError):  # noqa: N818 - named like the errors of `collectives`
    """A checkpoint could not be written.  The message names the ranks and the reasons."""


class LoadFailed(ValueError):  # noqa: N818
    """A checkpoint is missing, broken, or not of this model.  The message gives the reason."""


def save(strategy: Strategy, root: str | Path, step: int, keep: int | None = None) -> Path:
    """Save a checkpoint of a run after `step` steps.

    All ranks call this.  The checkpoint is complete when it returns on any rank.  The state of a
    communication hook (the errors of `PowerSGD`) is not saved.

    Parameters
    ----------
    strategy : Strategy
    root : str or Path
        The directory of all checkpoints of the run; it is created if needed.
    step : int
        The number of steps done, at least 0.
    keep : int, optional
        Remove all checkpoints but the last `keep`, at least 1.  By default remove none.

    Returns
    -------
    Path
        The directory of the checkpoint, on every rank.

    Raises
    ------
    SaveFailed
        On all ranks, if one fails, or if this step has been saved already.  Earlier checkpoints
        are not changed.
    ValueError
        If `step` or `keep` is too small.

    Examples
    --------
    >>> import tempfile
    >>> from parallel import Strategy, checkpoint, gpt
    >>> strategy = Strategy(None, gpt(num_layers=1, hidden=16))
    >>> root = tempfile.mkdtemp()
    >>> checkpoint.save(strategy, root, step=0).name
    'step-00000000'
    >>> checkpoint.load(strategy, checkpoint.latest(root))
    0
    """
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"step is {step} and keep is {keep}: they must be at least 0 and 1")
    path = checkpoint_path(root, step)
    unfinished = path.with_name(UNFINISHED + path.name)
    doing, is_first = f"saving step {step}", strategy.rank == 0
    try:
        with raise_on_all_ranks(strategy.comm, strategy.phase, "save", doing, SaveFailed):
            if is_first:
                prepare(unfinished, path)
        with raise_on_all_ranks(strategy.comm, strategy.phase, "save", doing, SaveFailed):
            write_part(strategy, unfinished, step)
        with raise_on_all_ranks(strategy.comm, strategy.phase, "save", doing, SaveFailed):
            if is_first:
                finish(strategy, unfinished, path, step)
                remove_old(path, keep)
    except SaveFailed:
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)  # the disk may be full
        raise
    return path


def load(strategy: Strategy, path: str | Path) -> int:
    """Set a strategy to the state in a checkpoint.

    All ranks call this, after `Strategy.resume` (or `start`).  Any strategy on any number of ranks
    can load any checkpoint of its model.  Options such as the learning rate are not loaded.

    Parameters
    ----------
    strategy : Strategy
        Its arrays are changed in place.
    path : str or Path
        The directory of a checkpoint, as `save` or `latest` returns it.

    Returns
    -------
    int
        The number of steps done, on every rank.

    Raises
    ------
    LoadFailed
        On all ranks, if the checkpoint is missing or incomplete, or if its model, dtype or
        optimizer states are not those of the strategy.  Then nothing has been changed.
    """
    path = Path(path)
    doing = f"loading {path.name}"
    with raise_on_all_ranks(strategy.comm, strategy.phase, "load", doing, LoadFailed):
        checkpoint = Checkpoint(path)
        checkpoint.check(strategy)
    with raise_on_all_ranks(strategy.comm, strategy.phase, "load", doing, LoadFailed):
        checkpoint.fill(strategy)
    return int(checkpoint.metadata["step"])


def checkpoint_path(root: str | Path, step: int) -> Path:
    """Return the directory in `root` of the checkpoint after `step` steps."""
    return Path(root, f"step-{step:08d}")


def latest(root: str | Path) -> Path | None:
    """Return the directory in `root` of the complete checkpoint with the most steps, or None.

    No communication takes place.
    """
    return next(reversed(complete(Path(root))), None)


def traffic(strategy: Strategy, phase: str = "save") -> list[PredictedCall]:
    """Return what one `save` or `load` of a `strategy` sends.

    `phase` is ``"save"`` or ``"load"``.  After each stage, all ranks tell each other whether they
    succeeded.
    """
    nbytes = REPORT.itemsize * strategy.size
    return [PredictedCall(phase, "all_gather", "ring", nbytes, NUM_STAGES[phase])]


# Writing


def prepare(unfinished: Path, path: Path) -> None:
    """Make a new directory; remove those of jobs that died while they saved or removed."""
    if path.exists():
        raise FileExistsError(f"this step has been saved already, in {path}")
    for left in path.parent.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left)
    unfinished.mkdir(parents=True)


def write_part(strategy: Strategy, folder: Path, step: int) -> None:
    """Write this rank's elements, and the index in the unit at which they begin, to the disk."""
    index, num_replicas = strategy.replica_group
    metadata, tensors = {"step": str(step)}, {}
    for unit in strategy.model.units:
        shard = strategy.shard_slice(unit)
        part = span(length(shard), num_replicas, index)
        for name, flat in arrays_of(strategy, unit).items():
            metadata[name] = str(shard.start + part.start)
            tensors[name] = on_host(flat[part])
    file = folder / file_name(strategy.rank, strategy.size)
    safetensors.numpy.save_file(tensors, file, metadata=metadata)
    sync(file)


def finish(strategy: Strategy, unfinished: Path, path: Path, step: int) -> None:
    """Add the metadata of all ranks, check the checkpoint, and give it its final name."""
    optimizer, scale = strategy.optimizer, strategy.loss_scale
    options = {k: x for k, x in vars(optimizer).items() if isinstance(x, int | float | tuple)}
    metadata = layout_of(strategy) | {
        "step": step, "ranks": strategy.size, "num_skipped": strategy.num_skipped,
        "loss_scale": {"value": scale.value, "num_good": scale.num_good},
        "optimizer": {"class": type(optimizer).__name__, **options},
    }  # fmt: skip
    (unfinished / METADATA_FILE).write_text(json.dumps(metadata, indent=1) + "\n")
    sync(unfinished / METADATA_FILE)
    Checkpoint(unfinished).check(strategy)
    sync(unfinished)
    unfinished.rename(path)
    sync(path.parent)


def remove_old(path: Path, keep: int | None) -> None:
    """Remove all checkpoints but this one and the last `keep` - 1 others.

    Each is renamed first, so that none is incomplete under its name.
    """
    others = [other for other in complete(path.parent) if other != path]
    for old in [] if keep is None else others[: len(others) + 1 - keep]:
        shutil.rmtree(old.rename(old.with_name(UNFINISHED + old.name)))


def sync(path: Path) -> None:
    """Return when the contents of a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading


class Part(NamedTuple):
    """Elements `start` to `stop` of an array, in a file: ``data[:]`` reads them."""

    start: int
    stop: int
    data: Any


class Checkpoint:
    """The checkpoint in a directory.

    Raises ValueError or OSError if there is none, or if a file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        if not (path / METADATA_FILE).is_file():
            raise ValueError(f"there is no checkpoint in {path}")
        with reading(path / METADATA_FILE):
            self.metadata = json.loads((path / METADATA_FILE).read_text())
        self.parts: dict[str, list[Part]] = {}
        for rank in range(self.metadata["ranks"]):
            self._open(path / file_name(rank, self.metadata["ranks"]))

    def _open(self, path: Path) -> None:
        """Register the parts in a file; this reads its header only."""
        with reading(path):
            file: Any = safetensors.safe_open(path, framework="numpy")
        starts: dict[str, str] = file.metadata() or {}
        if starts.pop("step", None) != str(self.metadata["step"]):
            raise ValueError(f"{path.name} is not of step {self.metadata['step']}")
        for name, start in starts.items():
            data = file.get_slice(name)
            part = Part(int(start), int(start) + data.get_shape()[0], data)
            self.parts.setdefault(name, []).append(part)

    def check(self, strategy: Strategy) -> None:
        """Raise ValueError unless the layout is the strategy's and each element exists once."""
        for what, expected in layout_of(strategy).items():
            for saved, wanted in zip_longest(self.metadata[what], expected, fillvalue="nothing"):
                if saved != wanted:
                    raise ValueError(
                        f"{what}: {saved} in the checkpoint, but {wanted} in the strategy"
                    )
        for unit, size in strategy.model.unit_sizes.items():
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
                fault = "are missing" if start > stop else "occur twice"
                low, high = sorted([start, stop])
                raise ValueError(f"elements {low} to {high} of {name} {fault}")

    def fill(self, strategy: Strategy) -> None:
        """Read what this rank keeps into its arrays, and nothing else."""
        for unit in strategy.model.units:
            self._read(f"{unit}.{VALUES}", strategy.stored_slice(unit), strategy.parameters[unit])
            for name, flat in arrays_of(strategy, unit).items():
                self._read(name, strategy.shard_slice(unit), flat)
        strategy.optimizer.steps = self.metadata["optimizer"]["steps"]
        strategy.num_skipped = self.metadata["num_skipped"]
        vars(strategy.loss_scale).update(self.metadata["loss_scale"])

    def _read(self, name: str, wanted: slice, into: Array) -> None:
        """Read the elements `wanted` of an array into `into`, in its dtype."""
        xp = array_namespace(into)
        for first, last, data in self.parts[name]:
            start, stop = max(first, wanted.start), min(last, wanted.stop)
            if start < stop:
                piece = into[start - wanted.start : stop - wanted.start]
                piece[...] = xp.asarray(data[start - first : stop - first], dtype=into.dtype)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ValueError with the file's name if its contents cannot be read."""
    try:
        yield
    except (ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path.name} is broken: {error}") from error


def complete(root: Path) -> list[Path]:
    """Return the complete checkpoints in `root`, sorted by their steps."""
    paths = [p for p in root.glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return sorted((p for p in paths if (p / METADATA_FILE).is_file()), key=num_steps_of)


def num_steps_of(path: Path) -> int:
    """Return the number of steps done before a checkpoint was saved, from its name."""
    return int(path.name.removeprefix("step-"))


# The names and layout of what is saved


def arrays_of(strategy: Strategy, unit: str) -> dict[str, Array]:
    """Return the arrays of a unit that this rank updates, by the names in the files."""
    kinds: dict[str, Mapping[str, Array]] = {VALUES: strategy.masters, **strategy.optimizer.states}
    return {f"{unit}.{kind}": flats[unit] for kind, flats in kinds.items()}


def layout_of(strategy: Strategy) -> dict[str, list[Any]]:
    """Return what must be equal when a checkpoint is saved and loaded, as JSON represents it."""
    units = strategy.model.units.items()
    return {
        "dtype": [strategy.dtype.name],
        "states": list(strategy.optimizer.states),
        "shapes": [[f"{u}.{k}", list(s.shape)] for u, specs in units for k, s in specs.items()],
    }


def file_name(rank: int, num_ranks: int) -> str:
    """Return the name of the file of a rank's part."""
    return f"rank-{rank}-of-{num_ranks}.safetensors"
