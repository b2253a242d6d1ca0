"""Checkpoints: save a training run, and continue it with any sharding on any number of ranks.

The directory ``ROOT/step-00000100`` contains ``checkpoint.json``, the index, and one safetensors
file of each rank that saved: boxes of the values that the optimizer updates, and of its states.  A
rank writes the elements that it updates, or an even part of them if other ranks update the same, so
that each is written once.

Ranks write to a directory of another name, which is renamed when all files are on the disk: a
checkpoint is complete or does not exist, even if ranks die while they save.  The index has the
digest of every file, and its own: a checkpoint of which a byte has changed is refused.  ROOT must
be on a file system that all ranks share, and only one job at a time may save there.
"""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

from parallel.accounts import PredictedCall
from parallel.checkpoint.reading import METADATA_FILE, Checkpoint
from parallel.checkpoint.writing import UNFINISHED, all_digests, finish, prepare, write_part
from parallel.runtime import Trainer, raise_on_all_ranks
from parallel.runtime.agreement import DIGEST_BYTES, REPORT
from parallel.runtime.prediction import with_checks

__all__ = [
    "LoadFailed", "SaveFailed", "checkpoint_path", "latest", "load", "num_steps_of", "save",
    "traffic",
]  # fmt: skip

NUM_STAGES = {"save": 3, "load": 2}


class SaveFailed(OSError):  # noqa: N818 - named like the errors of `collectives`
    """A checkpoint could not be written.  The message names the ranks and the reasons."""


class LoadFailed(ValueError):  # noqa: N818
    """A checkpoint is missing, broken, or not of this model.  The message gives the reason."""


def save(trainer: Trainer, root: str | Path, step: int, keep: int | None = None) -> Path:
    """Save a checkpoint of `trainer` after `step` steps; return its directory.

    All ranks call this.  The checkpoint is complete when it returns on any rank.  The directory
    `root` has all checkpoints of the run, and is created if needed.  All but the last `keep` are
    then removed; by default none.

    Raises SaveFailed, on all ranks, if one fails, or if this step has been saved already; earlier
    checkpoints are not changed.  Raises ValueError if `step` is less than 0, if `keep` is less than
    1, or if ranks have different parameters (local updates).

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
        raise ValueError(
            f"ranks have made {trainer.steps_alone} steps alone: save when they have one model"
        )
    path = checkpoint_path(root, step)
    unfinished = path.with_name(UNFINISHED + path.name)
    is_first = trainer.rank == 0
    stage = partial(
        raise_on_all_ranks, trainer.comm, trainer.phase, "save", f"saving step {step}", SaveFailed
    )
    try:
        with stage():
            if is_first:
                prepare(unfinished, path)
        digest = b""
        with stage():
            digest = write_part(trainer, unfinished, step)
        digests = all_digests(trainer, digest)
        with stage():
            if is_first:
                finish(trainer, unfinished, path, step, digests)
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
    dtype or optimizer states are not those of the trainer.  Then nothing has been changed.
    """
    path = Path(path)
    stage = partial(
        raise_on_all_ranks, trainer.comm, trainer.phase, "load", f"loading {path.name}", LoadFailed
    )
    with stage():
        checkpoint = Checkpoint(path)
        checkpoint.check(trainer)
        checkpoint.check_files(trainer.rank, trainer.size)
    with stage():
        checkpoint.fill(trainer)
    return checkpoint.index.step


def checkpoint_path(root: str | Path, step: int) -> Path:
    """Return the directory in `root` of the checkpoint after `step` steps."""
    return Path(root, f"step-{step:08d}")


def latest(root: str | Path) -> Path | None:
    """Return the directory in `root` of the complete checkpoint with the most steps, or None."""
    return next(reversed(complete(Path(root))), None)


def traffic(trainer: Trainer, phase: str = "save") -> list[PredictedCall]:
    """Return what one `save` or `load` of a `trainer` sends.

    `phase` is ``"save"`` or ``"load"``.  After each stage, all ranks tell each other whether they
    succeeded; when a checkpoint is saved, also the digests of their files.
    """
    if trainer.comm is None:
        return []
    reports = PredictedCall(
        phase, "all_gather", "ring", (REPORT.itemsize,) * trainer.size, num_calls=NUM_STAGES[phase]
    )
    digests = PredictedCall(phase, "all_gather", "ring", (DIGEST_BYTES,) * trainer.size)
    calls = [reports, digests] if phase == "save" else [reports]
    return with_checks(calls, trainer.comm)


def remove_old(path: Path, keep: int | None) -> None:
    """Remove all checkpoints but this one and the last `keep` - 1 others."""
    others = [other for other in complete(path.parent) if other != path]
    for old in [] if keep is None else others[: len(others) + 1 - keep]:
        # Renamed first, so that none is incomplete under its name.
        shutil.rmtree(old.rename(old.with_name(UNFINISHED + old.name)))


def complete(root: Path) -> list[Path]:
    """Return the complete checkpoints in `root`, sorted by their steps."""
    paths = [p for p in root.glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return sorted((p for p in paths if (p / METADATA_FILE).is_file()), key=num_steps_of)


def num_steps_of(path: Path) -> int:
    """Return the number of steps done before a checkpoint was saved, from its `path`."""
    return int(path.name.removeprefix("step-"))
