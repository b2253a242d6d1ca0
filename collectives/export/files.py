"""Writes the tasks of all ranks to files or to standard output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from collectives.export import chakra, goal, smpi
from collectives.export.tasks import Task

Ranks = Sequence[Sequence[Task]]
TEXTS: dict[str, Callable[[Ranks], Iterator[str]]] = {"goal": goal.lines, "smpi": smpi.lines}


def write(ranks: Ranks, form: str, path: Path | None = None) -> list[Path]:
    """Write the tasks of all ranks.

    - `ranks`: the tasks of rank 0, 1, ..., of `Call.tasks` or `parallel.step_tasks`.
    - `form`: the format: "goal", "smpi" or "chakra".
    - `path`: of the file; for "chakra" the files are ``path.RANK.et``; None: standard output.

    Returns the paths of the files.  Raises ValueError for another format, and for "chakra" without
    a path; OSError if a file cannot be written.
    """
    if form == "chakra":
        if path is None:
            raise ValueError("chakra has a file for each rank, so it needs a path")
        return [_trace(tasks, path, rank) for rank, tasks in enumerate(ranks)]
    if form not in TEXTS:
        raise ValueError(f"unknown format {form!r}; known: {', '.join((*TEXTS, 'chakra'))}")
    return write_text((f"{line}\n" for line in TEXTS[form](ranks)), path)


def write_text(parts: Iterable[str], path: Path | None) -> list[Path]:
    """Write text to a file, or to standard output; return the paths of the files."""
    if path is None:
        sys.stdout.writelines(parts)
        return []
    with path.open("w") as file:
        file.writelines(parts)
    return [path]


def summary(paths: Sequence[Path]) -> str:
    """A sentence on the files that were written; none if there are none."""
    if len(paths) > 2:
        return f"wrote {len(paths)} files, {paths[0]} to {paths[-1]}\n"
    return f"wrote {' and '.join(map(str, paths))}\n" if paths else ""


def _trace(tasks: Sequence[Task], path: Path, rank: int) -> Path:
    name = path.with_name(f"{path.name}.{rank}.et")
    with name.open("wb") as file:
        file.writelines(chakra.trace(tasks))
    return name
