"""Write the tasks of all ranks to files or to standard output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from collectives.export import chakra, goal, smpi
from collectives.export.tasks import Task

Ranks = Sequence[Sequence[Task]]
TEXTS: dict[str, Callable[[Ranks], Iterator[str]]] = {"goal": goal.lines, "smpi": smpi.lines}


def write(ranks: Ranks, form: str, path: Path | None = None) -> list[Path]:
    """Write the tasks of all ranks; return the paths of the files.

    Parameters
    ----------
    ranks : sequence of sequence of Task
        The tasks of rank 0, 1, ..., of `Call.tasks` or `parallel.step_tasks`.
    form : str
        The format: "goal", "smpi" or "chakra".
    path : Path, optional
        The file; for "chakra" the files are ``path.RANK.et``; None: standard output.

    Raises
    ------
    ValueError
        If there is no such format, and for "chakra" without a path.
    OSError
        If a file cannot be written.

    Examples
    --------
    >>> from collectives.export import Task, write
    >>> write([[Task("send", 8, peer=1)], [Task("receive", 8, peer=0)]], "smpi")
    0 init
    0 isend 1 0 8
    0 waitall
    0 finalize
    1 init
    1 irecv 0 0 8
    1 waitall
    1 finalize
    []
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
    """Return a sentence on the files that were written; none if there are none."""
    if len(paths) > 2:
        return f"wrote {len(paths)} files, {paths[0]} to {paths[-1]}\n"
    return f"wrote {' and '.join(map(str, paths))}\n" if paths else ""


def _trace(tasks: Sequence[Task], path: Path, rank: int) -> Path:
    name = path.with_name(f"{path.name}.{rank}.et")
    with name.open("wb") as file:
        file.writelines(chakra.trace(tasks))
    return name
