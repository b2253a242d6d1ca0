"""The MPI jobs that a command starts one after the other, and their results."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from collectives.launch import launch
from collectives.launch.mpirun import MpiNotFound, find_mpirun

ROOT = Path(__file__).resolve().parent.parent


def environment() -> dict[str, str]:
    """The environment in which ranks import from this tree and from the user's PYTHONPATH."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join(paths)}


def has_mpi(console: Console) -> bool:
    """Whether there is an MPI to start jobs with; if not, print what to install."""
    try:
        find_mpirun()
    except MpiNotFound as error:
        console.print(str(error), markup=False)
        return False
    return True


class Jobs:
    """Jobs by name: their JSON results and exit statuses."""

    def __init__(self, console: Console, folder: Path, timeout: float) -> None:
        """`timeout`: seconds for each job.  `folder`: where they write their files."""
        self.console, self.folder, self.timeout = console, folder, timeout
        self.results: dict[str, dict[str, Any]] = {}
        self.statuses: dict[str, int] = {}

    def title(self, text: str) -> None:
        """A heading."""
        self.console.print(f"\n[bold]== {text} ==[/bold]\n")

    def run(
        self,
        name: str,
        size: int,
        command: Sequence[str],
        mpi_args: Sequence[str] = (),
        *,
        json_option: str = "--json",
        is_quiet: bool = False,
    ) -> tuple[int, dict[str, Any]]:
        """Run a command on so many ranks: its exit status, and what it wrote to its JSON file.

        A quiet job is only heard if it fails.
        """
        self.console.print("$ " + shlex.join(shown(size, command, mpi_args)), markup=False)
        path = self.folder / f"{name}.json"
        done = launch(
            size,
            [*command, json_option, str(path)],
            mpi_args=mpi_args,
            timeout=self.timeout,
            env=environment(),
            capture=is_quiet,
        )
        if is_quiet and done.returncode:
            self.console.print(f"{done.stdout}{done.stderr}", markup=False)
        self.results[name] = json.loads(path.read_text()) if path.exists() else {}
        self.statuses[name] = done.returncode
        return done.returncode, self.results[name]


def shown(size: int, command: Sequence[str], mpi_args: Sequence[str]) -> list[str]:
    """The command with which the user can repeat a job."""
    args = ["--mpi-args", shlex.join(mpi_args)] if mpi_args else []
    return ["python", "-m", "collectives.launch", "-n", str(size), *args, *command]
