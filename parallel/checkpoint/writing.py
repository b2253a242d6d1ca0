"""Write a checkpoint: each rank its boxes, and rank 0 the index."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import safetensors.numpy

from parallel.checkpoint.index import Index, layout_of
from parallel.checkpoint.reading import METADATA_FILE, VALUES, Checkpoint
from parallel.nn import Array, on_host
from parallel.placement import length, pieces_of, span
from parallel.runtime import Trainer
from parallel.runtime.agreement import DIGEST_BYTES

UNFINISHED = ".unfinished-"  # prefix of a directory that is being written or removed


def prepare(unfinished: Path, path: Path) -> None:
    """Make a new directory; remove those of jobs that died while they saved or removed."""
    if path.exists():
        raise FileExistsError(f"this step has been saved already, in {path}")
    for left in path.parent.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left)
    unfinished.mkdir(parents=True)


def write_part(trainer: Trainer, folder: Path, step: int) -> bytes:
    """Write this rank's boxes to the disk, and where each begins; return the file's SHA-256."""
    index, num_replicas = trainer.replica_group
    starts: dict[str, list[int]] = {}
    tensors: dict[str, Array] = {}
    for unit in trainer.model.units:
        shard = trainer.shard_slice(unit)
        mine = span(length(shard), num_replicas, index)
        part = slice(shard.start + mine.start, shard.start + mine.stop)
        for name, box, flat in pieces_of(trainer.model.boxes(unit), part):
            for kind, arrays in {VALUES: trainer.masters, **trainer.optimizer.states}.items():
                if trainer.is_first_copy(unit, name):
                    key = f"{unit}.{name}/{kind}@{','.join(map(str, box.start))}"
                    starts[key] = list(box.start)
                    tensors[key] = on_host(arrays[unit][mine][flat]).reshape(box.shape)
    equal, summed, own = trainer.sharding.reduction.state(trainer)
    hook = {**(equal if trainer.rank == 0 else {}), **summed, **own}
    tensors |= {f"hook/{name}": on_host(x) for name, x in hook.items()}
    file = folder / file_name(trainer.rank, trainer.size)
    # One entry only: safetensors writes several in any order, and files would differ.
    metadata = {"boxes": json.dumps({"step": step, "starts": starts})}
    safetensors.numpy.save_file(tensors, file, metadata=metadata)
    sync(file)
    return hashlib.sha256(file.read_bytes()).digest()


def all_digests(trainer: Trainer, digest: bytes) -> list[str]:
    """Return the digests of all ranks' files, in hexadecimal.  All ranks call this."""
    mine = np.frombuffer(digest, np.uint8)
    table = mine
    if trainer.comm is not None:
        with trainer.phase("save"):
            table = trainer.comm.all_gather(mine, algorithm="ring")
    return [bytes(row).hex() for row in table.reshape(-1, DIGEST_BYTES)]


def finish(trainer: Trainer, unfinished: Path, path: Path, step: int, digests: list[str]) -> None:
    """Add the index, check the checkpoint, and give it its final name."""
    optimizer, scale = trainer.optimizer, trainer.loss_scale
    options = {k: x for k, x in vars(optimizer).items() if isinstance(x, int | float | tuple)}
    files = {file_name(r, trainer.size): digest for r, digest in enumerate(digests)}
    index = Index(
        step, trainer.num_skipped, files, layout_of(trainer, optimizer.states),
        {"value": float(scale.value), "num_good": scale.num_good},
        {"class": type(optimizer).__name__, **options},
    )  # fmt: skip
    (unfinished / METADATA_FILE).write_text(index.to_json())
    sync(unfinished / METADATA_FILE)
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


def file_name(rank: int, num_ranks: int) -> str:
    """Return the name of the file of a rank's part."""
    return f"rank-{rank}-of-{num_ranks}.safetensors"
