"""Checkpoints: save a training run, and continue it with any sharding on any number of ranks.

The directory ``ROOT/step-00000100`` contains ``checkpoint.json``, the index, and one safetensors
file of each rank that saved: boxes of the values that the optimizer updates, and of its states.
Each element is written once: ranks that update the same elements write even parts of them.

Ranks write to a directory of another name, which is renamed when all files are on the disk: a
checkpoint is complete or does not exist, even if ranks die while they save.  The index has the
digest of every file, and its own: a checkpoint with a changed byte is refused.  ROOT must
be on a file system that all ranks share, and only one job at a time may save there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.numpy

import collectives
from collectives import Communicator
from parallel.accounts import PredictedCall
from parallel.checkpoint.contents import METADATA_FILE, VALUES, Checkpoint, Index, file_name
from parallel.mesh import length, pieces_of, span
from parallel.nn import Array, Model, on_host
from parallel.optim import dtype_of
from parallel.predict import with_checks
from parallel.run import DIGEST_BYTES, REPORT, Trainer, raise_on_all_ranks

__all__ = [
    "LoadFailed",
    "SaveFailed",
    "checkpoint_path",
    "latest",
    "load",
    "load_parameters",
    "num_steps_of",
    "save",
    "traffic",
]

UNFINISHED = ".unfinished-"  # prefix of a directory that is being written or removed


class SaveFailed(OSError):  # noqa: N818 - named like the errors of `collectives`
    """A checkpoint could not be written.  The message names the ranks and the reasons."""


class LoadFailed(ValueError):  # noqa: N818
    """A checkpoint is missing, broken, or not of this model.  The message gives the reason."""


def save(trainer: Trainer, root: str | Path, step: int, keep: int | None = None) -> Path:
    """Save a checkpoint of `trainer` after `step` steps in `root`; return its directory.

    All ranks call this.  The checkpoint is complete when `save` returns on any rank.  Then all but
    the last `keep` checkpoints in `root` are removed; by default none is.

    Raises SaveFailed, on all ranks, if a rank fails, or if this step has been saved already;
    earlier checkpoints are not changed.  Raises ValueError if `step` is less than 0, if `keep` is
    less than 1, or if ranks have different parameters (local updates).

    Examples
    --------
    >>> import tempfile
    >>> from parallel import Trainer, checkpoint, gpt
    >>> trainer = Trainer(None, gpt(num_layers=1, hidden=16))
    >>> root = tempfile.mkdtemp()
    >>> checkpoint.save(trainer, root, step=0).name
    'step-00000000'
    >>> checkpoint.load(trainer, checkpoint.latest(root))
    0
    """
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"step is {step} and keep is {keep}: they must be at least 0 and 1")
    if trainer.steps_alone:
        made = f"ranks have made {trainer.steps_alone} steps alone"
        raise ValueError(f"{made}: save when they have one model")
    path, doing = checkpoint_path(root, step), f"saving step {step}"
    unfinished, is_first = path.with_name(UNFINISHED + path.name), trainer.rank == 0
    stage = partial(raise_on_all_ranks, trainer.comm, trainer.phase, "save", doing, SaveFailed)
    digest = b""
    try:
        with stage():
            if is_first:
                prepare(unfinished, path)
        with stage():
            digest = write_part(trainer, unfinished, step)
        digests = np.frombuffer(digest, np.uint8)[None]
        if trainer.comm is not None:
            with trainer.phase("save"):
                digests = trainer.comm.all_gather(digests, algorithm="ring")
        with stage():
            if is_first:
                finish(trainer, unfinished, path, step, [bytes(row).hex() for row in digests])
                remove_old(path, keep)
    except SaveFailed:
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)  # the disk may be full
        raise
    return path


def load(trainer: Trainer, path: str | Path) -> int:
    """Set `trainer` to the state in the checkpoint at `path`; return the number of steps done.

    All ranks call this, after `Trainer.resume` (or `start`).  Any trainer on any number of ranks
    can load any checkpoint of its model.  Options such as the learning rate are not loaded.

    Raises LoadFailed, on all ranks, if the checkpoint is missing or incomplete, or if its model,
    dtype or optimizer states differ from the trainer's.  The trainer is then unchanged.
    """
    path = Path(path)
    doing = f"loading {path.name}"
    stage = partial(raise_on_all_ranks, trainer.comm, trainer.phase, "load", doing, LoadFailed)
    with stage():
        checkpoint = Checkpoint(path)
        checkpoint.check(trainer)
        checkpoint.check_files(trainer.rank, trainer.size)
    with stage():
        checkpoint.fill(trainer)
    return checkpoint.index.step


def load_parameters(
    path: str | Path, model: Model, comm: Communicator | None, dtype: str = "float64"
) -> dict[str, Array]:
    """Return the parameters in the checkpoint at `path`, by unit: this rank's part of a `model`.

    The parameters are 1-d arrays of a `dtype` in host memory; nothing else is read.  All ranks of
    the model's mesh, whose communicator is `comm`, call this; None stands for one rank alone.
    Layers with a state, such as the biases of experts, get the state in the checkpoint.

    Raises LoadFailed, on all ranks, if the checkpoint is missing or incomplete, or if its model is
    another one.
    """
    path = Path(path)
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    doing, values = f"loading {path.name}", dict[str, Array]()
    with raise_on_all_ranks(comm, collectives.phase, "load", doing, LoadFailed):
        checkpoint = Checkpoint(path)
        checkpoint.check_values(model)
        checkpoint.check_files(rank, size)
        values |= checkpoint.values(model, dtype_of(dtype))
    return values


def traffic(trainer: Trainer, phase: str = "save") -> list[PredictedCall]:
    """Return what one `save` or `load` of a `trainer` sends; `phase` is ``"save"`` or ``"load"``.

    All ranks tell each other after each stage whether they succeeded, and the digests of files.
    """
    if trainer.comm is None:
        return []
    num_calls = {"save": {REPORT.itemsize: 3, DIGEST_BYTES: 1}, "load": {REPORT.itemsize: 2}}
    calls = [
        PredictedCall(phase, "all_gather", "ring", (nbytes,) * trainer.size, num_calls=times)
        for nbytes, times in num_calls[phase].items()
    ]
    return with_checks(calls, trainer.comm)


# Directories


def checkpoint_path(root: str | Path, step: int) -> Path:
    """Return the directory in `root` of the checkpoint after `step` steps."""
    return Path(root, f"step-{step:08d}")


def num_steps_of(path: Path) -> int:
    """Return the number of steps done before a checkpoint was saved, from its `path`."""
    return int(path.name.removeprefix("step-"))


def latest(root: str | Path) -> Path | None:
    """Return the directory in `root` of the complete checkpoint with the most steps, or None."""
    return max(complete(Path(root)), key=num_steps_of, default=None)


def complete(root: Path) -> list[Path]:
    """Return the complete checkpoints in `root`."""
    paths = [p for p in root.glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return [p for p in paths if (p / METADATA_FILE).is_file()]


def remove_old(path: Path, keep: int | None) -> None:
    """Remove all checkpoints but this one and the last `keep` - 1 others."""
    others = sorted((p for p in complete(path.parent) if p != path), key=num_steps_of)
    for old in [] if keep is None else others[: max(0, len(others) + 1 - keep)]:
        # Renamed first: an incomplete checkpoint never has the name of a complete one.
        shutil.rmtree(old.rename(old.with_name(UNFINISHED + old.name)))


# The stages of saving


def prepare(unfinished: Path, path: Path) -> None:
    """Make a new directory; remove directories of jobs that died while they saved or removed."""
    if path.exists():
        raise FileExistsError(f"this step has been saved already, in {path}")
    for left in path.parent.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left)
    unfinished.mkdir(parents=True)


def write_part(trainer: Trainer, folder: Path, step: int) -> bytes:
    """Write this rank's boxes to the disk, and where each begins; return the file's SHA-256."""
    view = trainer.view
    others = [axis for axis in view.mesh.axes if axis not in view.sharding.axes]
    starts: dict[str, list[int]] = {}
    tensors: dict[str, Array] = {}
    for unit in view.unit_sizes:
        shard, (index, num_replicas) = view.shard_slice(unit), view.replicas(unit)
        mine = span(length(shard), num_replicas, index)
        part = slice(shard.start + mine.start, shard.start + mine.stop)
        for name, box, flat in pieces_of(trainer.model.boxes(unit), part):
            if not view.is_first_copy(unit, name, others):
                continue
            for kind, arrays in {VALUES: trainer.masters, **trainer.optimizer.states}.items():
                key = f"{name}/{kind}@{','.join(map(str, box.start))}"
                starts[key] = list(box.start)
                tensors[key] = on_host(arrays[unit][mine][flat]).reshape(box.shape)
    equal, summed, own = trainer.sharding.reduction.state(trainer.optimizer)
    hook = {**(equal if trainer.rank == 0 else {}), **summed, **own}
    tensors |= {f"hook/{name}": on_host(x) for name, x in hook.items()}
    file = folder / file_name(trainer.rank, trainer.size)
    # One entry only: safetensors writes several in any order, and files would differ.
    metadata = {"boxes": json.dumps({"step": step, "starts": starts})}
    safetensors.numpy.save_file(tensors, file, metadata=metadata)
    sync(file)
    return hashlib.sha256(file.read_bytes()).digest()


def finish(trainer: Trainer, unfinished: Path, path: Path, step: int, digests: list[str]) -> None:
    """Add the index, check the checkpoint, and give it its final name."""
    index = unfinished / METADATA_FILE
    index.write_text(Index.of(trainer, step, digests).to_json())
    sync(index)
    Checkpoint(unfinished).check(trainer)
    sync(unfinished)
    unfinished.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Return when the contents of a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
