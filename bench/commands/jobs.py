"""The MPI jobs that a command starts one after the other, and their results."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from collectives.console import Table, refusing
from collectives.launch import launch
from collectives.launch.mpirun import MpiNotFound, find_mpirun

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """Return the variables with which ranks import from this tree and the user's PYTHONPATH."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join(paths)}


class Jobs:
    """Jobs by name: their JSON results and exit statuses.

    Parameters
    ----------
    console : Console
        Where their output is shown.
    folder : Path
        Where they write their files.
    timeout : float
        Seconds after which a job is ended.
    """

    def __init__(self, console: Console, folder: Path, timeout: float) -> None:
        self.console, self.folder, self.timeout = console, folder, timeout
        self.results: dict[str, dict[str, Any]] = {}
        self.statuses: dict[str, int] = {}

    @property
    def mpi(self) -> str:
        """The MPI library that the jobs ran under, as they say."""
        names = (result["mpi"] for result in self.results.values() if "mpi" in result)
        return next(names, "no MPI")

    def title(self, text: str) -> None:
        """Print a heading."""
        self.console.print(f"\n== {text} ==\n", style="bold")

    def show(self, tables: Mapping[str, Table]) -> None:
        """Print tables below their titles."""
        for title, table in tables.items():
            self.console.print(f"\n{title}")
            table.print(self.console)

    def run(
        self,
        name: str,
        size: int,
        command: Sequence[str],
        mpi_args: Sequence[str] = (),
        *,
        is_quiet: bool = False,
    ) -> tuple[int, dict[str, Any]]:
        """Run a command on `size` ranks; return its exit status and the JSON that it has written.

        The output of a quiet job is shown only if it fails.
        """
        is_quiet |= self.console.quiet
        self.console.print("$ " + shlex.join(repeated(size, command, mpi_args)), soft_wrap=True)
        path = self.folder / f"{name}.json"
        done = launch(
            size,
            [*command, "--json", str(path)],
            mpi_args=mpi_args,
            timeout=self.timeout,
            env=environment(),
            capture=is_quiet,
        )
        if is_quiet and done.returncode:
            self.console.print(f"{done.stdout}{done.stderr}", soft_wrap=True)
        self.results[name] = json.loads(path.read_text()) if path.exists() else {}
        self.statuses[name] = done.returncode
        return done.returncode, self.results[name]


@contextmanager
def starting_jobs(console: Console, options: argparse.Namespace) -> Iterator[Jobs]:
    """Return a context manager for the jobs of a command.  Raises Refused if there is no MPI."""
    with refusing(MpiNotFound):
        find_mpirun()
    with TemporaryDirectory() as folder:
        yield Jobs(console, Path(folder), options.timeout)


def repeated(size: int, command: Sequence[str], mpi_args: Sequence[str]) -> list[str]:
    """Return the command with which the user can repeat a job."""
    args = ["--mpi-args", shlex.join(mpi_args)] if mpi_args else []
    return ["python", "-m", "collectives.launch", "-n", str(size), *args, *command]


def last_line(text: str) -> str:
    """Return the last line that is not blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it says nothing"
