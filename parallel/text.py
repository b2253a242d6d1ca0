"""Text to train on: the bytes of files, and batches that do not depend on the number of ranks."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from parallel.mesh import span

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Tokens: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def load(path: str | Path | None = None) -> Bytes:
    """Return the bytes of a file or directory, or of Python's standard library: 1-d, uint8.

    Files are read in the order of their paths.  Without a `path`, the ``.py`` files of the standard
    library are read, without tests.  Every rank reads for itself, so the text must be the same on
    every machine.  Raises ValueError if there is no file, or if all are empty.
    """
    files = library_files() if path is None else [Path(path), *Path(path).rglob("*")]
    files.sort(key=lambda file: file.parts)  # the same in every locale and file system
    text = b"".join(file.read_bytes() for file in files if file.is_file())
    if not text:
        raise ValueError(f"there is no text in {path}")
    return np.frombuffer(text, dtype=np.uint8)


def library_files() -> list[Path]:
    """Return the ``.py`` files of Python's standard library, several MB, without tests."""
    files: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [f for f in folders if f not in EXCLUDED]  # os.walk visits only what is left
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return files


def unigram_entropy(data: Bytes) -> float:
    """Return -sum f log f, in nats, for the frequencies f of bytes in `data`.

    No model that ignores the context has a smaller loss.
    """
    counts = np.bincount(data, minlength=256)
    frequency = counts[counts > 0] / len(data)
    return float(-np.sum(frequency * np.log(frequency)))


def share(total: int, num_ranks: int, rank: int) -> slice:
    """Return the rows of a batch of `total` rows that belong to `rank`, one of `num_ranks`.

    The rows are contiguous; the first ranks may have one row more.  Raises ValueError if a rank has
    none.
    """
    if total < num_ranks:
        raise ValueError(f"a global batch of {total} cannot be divided among {num_ranks} ranks")
    return span(total, num_ranks, rank)


def batch(
    data: Bytes,
    *,
    seed: int,
    step: int,
    batch_size: int,
    context: int,
    rank: int = 0,
    num_ranks: int = 1,
) -> tuple[Tokens, Tokens]:
    """Return one rank's rows of the batch of a step: the inputs, and the byte after each of them.

    Both are int64 (rows, `context`) in 0..255.  The whole batch of `batch_size` rows is a function
    of `data` (see `load`), `seed`, `step` and `batch_size`; `num_ranks` divide it, and `rank` gets
    its `share`.  Raises ValueError if `data` is not longer than `context`, or if a rank would have
    no rows.

    Examples
    --------
    >>> from parallel import text
    >>> data = text.load()
    >>> inputs, targets = text.batch(
    ...     data, seed=0, step=0, batch_size=8, context=16, rank=1, num_ranks=3
    ... )
    >>> inputs.shape, bool((inputs[:, 1:] == targets[:, :-1]).all())
    ((3, 16), True)
    """
    if len(data) <= context:
        raise ValueError(f"a text of {len(data)} bytes is too short for a context of {context}")
    rng = np.random.default_rng([seed, step, batch_size])
    starts = rng.integers(0, len(data) - context, size=batch_size)
    mine = starts[share(batch_size, num_ranks, rank), None]
    tokens = data[mine + np.arange(context + 1)].astype(np.int64)
    return tokens[:, :-1], tokens[:, 1:]
