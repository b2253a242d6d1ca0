"""Text to train on: bytes of files, and batches that do not depend on how ranks divide them."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from parallel.shards import span

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Tokens: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def load(path: str | Path | None = None) -> Bytes:
    """The bytes of a file, of all files under a directory, or (None) of Python's own library.

    Files follow each other in the order of their paths below the directory.  Every rank reads for
    itself, so the text must be the same on every machine.  ValueError where there is none.
    """
    root = standard_library() if path is None else Path(path)
    files = library_files(root) if path is None else all_files(root)
    text = b"".join(file.read_bytes() for file in files)
    if not text:
        raise ValueError(f"no text in {root}")
    return np.frombuffer(text, dtype=np.uint8)


def standard_library() -> Path:
    """Where Python keeps its standard library: several MB of text on every machine."""
    return Path(sysconfig.get_paths()["stdlib"])


def library_files(root: Path) -> list[Path]:
    """The library's .py files, without installed packages and tests."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in NOT_LIBRARY]  # walk goes into what is left
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return in_order(files)


def all_files(root: Path) -> list[Path]:
    """`root` itself if it is a file, or every file under it."""
    return [root] if root.is_file() else in_order(f for f in root.rglob("*") if f.is_file())


def in_order(files: Iterable[Path]) -> list[Path]:
    """Sorted by path, part by part, which no locale and no file system changes."""
    return sorted(files, key=lambda file: file.parts)


def unigram_entropy(data: Bytes) -> float:
    """Nats per byte of the best guess that looks at no context: -sum f log f over frequencies."""
    counts = np.bincount(data, minlength=256)
    frequency = counts[counts > 0] / len(data)
    return float(-np.sum(frequency * np.log(frequency)))


def share(total: int, ranks: int, rank: int) -> slice:
    """Rank's contiguous part of range(total); sizes differ by at most one, larger ones first.

    ValueError if some rank would get nothing.
    """
    if total < ranks:
        raise ValueError(f"a global batch of {total} cannot be divided among {ranks} ranks")
    return span(total, ranks, rank)


def batch(
    data: Bytes, *, seed: int, step: int, size: int, context: int, rank: int = 0, ranks: int = 1
) -> tuple[Tokens, Tokens]:
    """Rank's rows of the global batch of `size`: bytes, and those after each, (rows, context) both.

    The global batch is a function of (seed, step, size) and the text, whatever `ranks` is.
    """
    if len(data) <= context:
        raise ValueError(f"a text of {len(data)} bytes is too short for a context of {context}")
    rng = np.random.default_rng([seed, step, size])
    starts = rng.integers(0, len(data) - context, size=size)[share(size, ranks, rank)]
    windows = data[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows[:, :-1], windows[:, 1:]
