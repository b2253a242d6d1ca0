"""Run everything that needs a GPU: tests, times of collectives, and training by every strategy.

    make gpu
    PYTHON=python3 GPU_OUT=results make gpu
    make gpu ARGS='--only "tests devices" --only "devices 2"'

The output of each step is written to its own file in the folder, the result of each step to
summary.txt, and the numbers of all steps to gpu.json, for `make docs ARGS='--gpu FILE'`.  If a step
fails, the others run all the same.  Tests run at the same time, then the other steps one after the
other.  All together take at most 9 minutes: what then is left fails without being run, and can be
run by --only.  Without an MPI the ranks are threads, and steps that need MPI are skipped.
The steps with "mps" in their names need NVIDIA's Multi-Process Service, start it, and end it; where
there is none, they say so.  Nothing is installed: all modules must be present.

The exit status is 1 if a step failed, 2 if there is no GPU or a module is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

from bench.commands.jobs import ROOT
from bench.gpu import mps
from collectives.console import Command, Refused, refusing, write_json

MODULES = (
    "array_api_compat",
    "cupy",
    "hypothesis",
    "ml_dtypes",
    "mpi4py",
    "numba",
    "numpy",
    "pytest",
    "pytest_timeout",
    "rich",
)
BUDGET = 490  # seconds in which steps may run
LIMIT = 240  # seconds for a step
PATIENCE = 45  # seconds for a step to end what it has started, when its time is up
SIZES = "-b 1K -e 16M -f 128 -w 1 -n 3 --seconds 0.1 --algorithm all --call"
DEVICES = (
    "--device cuda --native --call --collectives all_reduce reduce_scatter all_gather all_to_all "
    "broadcast --sizes 1K 128K 1M 16M 64M -T 60 -w 1 -n 5 --seconds 0.05 --algorithm one_shot,"
    "two_shot,ring,direct,recursive_halving,bruck,linear,pairwise,binomial,scatter_all_gather"
)
NCCL_SHARES = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # so that several ranks may use one GPU
TESTS = "tests "  # how their names begin
KERNELS = "test_kernels.py"  # whose ranks must run at the same time, and alone
TORCH = "--device cuda --sizes 1K,1M,64M --hidden 64 -n 5 -w 2"
MODEL = "--device cuda --steps 5 --layers 2 --hidden 64 --context 32 --batch 19 --dtype float32"
LAYOUTS = {
    "tensor": "--mesh tensor=2 --sequence-parallel",
    "context": "--mesh context=2",
    "pipe": "--mesh pipe=2 --batch 16 --micro-batches 4",
    "expert": "--mesh expert=2 --batch 16 --moe switch --experts 4",
}


class Limits(NamedTuple):
    """The seconds in which all steps may run, and in which one may."""

    of_all: float = BUDGET
    of_one: float = LIMIT


LIMITS = Limits()


class Step(NamedTuple):
    """A command, and the name of its files; `json`: the option that names its file of numbers."""

    name: str
    command: Sequence[str]
    json: str | None = None


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parse.add_argument("--out", type=Path, default="gpu-results", help="folder; %(default)s")
    about = "steps whose names begin so, such as tests or train; may be repeated"
    parse.add_argument("--only", action="append", metavar="WORD", help=about)


def run(options: argparse.Namespace) -> int:
    """Run all steps; return 0, or 1 if one fails.  Raises Refused."""
    if reason := why_unavailable():
        raise Refused(f"nothing was run: {reason}")
    with refusing():
        options.out.mkdir(parents=True, exist_ok=True)
    why_no_mpi = no_mpi()
    return run_steps(chosen(steps(why_no_mpi), options.only), options.out, facts(), why_no_mpi)


def chosen(of_all: Iterable[Step], words: Sequence[str] | None) -> list[Step]:
    """Return the steps whose names begin with one of these words; all steps without words."""
    return [step for step in of_all if step.name.startswith(tuple(words or [""]))]


def run_steps(
    to_run: Sequence[Step],
    folder: Path,
    machine: Mapping[str, Any],
    why_no_mpi: str | None = None,
    limits: Limits = LIMITS,
) -> int:
    """Run steps, and write their numbers and a summary; return 0, or 1 if one fails.

    `machine`: when and on what they run.
    """
    lines = all_ended(to_run, folder, limits)
    numbers = {step.name: read for step in to_run if (read := numbers_of(step, folder))}
    write_json({**machine, **numbers}, folder / "gpu.json")
    failed = [line for line in lines if not line.startswith("ok")]
    lines.append(f"{len(failed)} of {len(lines)} steps failed; see {folder}/")
    if why_no_mpi:
        lines.append(f"left out, for there is no MPI: what takes mpirun.  {why_no_mpi}")
    (folder / "summary.txt").write_text("\n".join(lines) + "\n")
    print("", *lines, sep="\n")
    return int(bool(failed))


def why_unavailable() -> str | None:
    """Return what is missing, as a sentence, or None."""
    if missing := [name for name in MODULES if importlib.util.find_spec(name) is None]:
        return f"{sys.executable} has no {', '.join(missing)}; PYTHON=... says which Python to use"
    from collectives.arrays import num_gpus  # noqa: PLC0415 - takes the modules

    return num_gpus()[1] or None


def no_mpi() -> str | None:
    """Return why no MPI job can be started, or None."""
    from collectives.launch.mpirun import MpiNotFound, find_mpirun  # noqa: PLC0415 - takes the modules

    try:
        find_mpirun()
    except MpiNotFound as error:
        return str(error)
    return None


def torch_has_cuda() -> bool:
    """Return whether there is a PyTorch that can use a GPU here."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch  # noqa: PLC0415 - takes seconds

    return bool(torch.cuda.is_available())


def steps(no_mpi: str | None) -> Iterator[Step]:
    """Yield all steps that can run here, on two ranks, which may share a GPU."""
    from bench.training.strategies import KINDS  # noqa: PLC0415 - takes the modules

    folder = ROOT / "tests" / "gpu"
    for path in sorted({*folder.glob("test_*.py")} - {folder / KERNELS}):
        yield Step(TESTS + path.stem.removeprefix("test_"), ["-m", "pytest", str(path)])
    launch = launched(2)
    if no_mpi is None:
        words = [
            "-m",
            "bench.gpu.mps",
            str(LIMIT - PATIENCE),
            "-m",
            "pytest",
            str(folder / KERNELS),
        ]
        yield Step("kernels mps", words)
        yield from device_tables()
        words = ["-m", "bench", "all", "--device", "cuda", *SIZES.split()]
        yield Step("collectives", launch + words, "-J")
        if torch_has_cuda():
            yield Step("torch", ["-m", "bench", "torch", *TORCH.split()], "-J")
    layouts = {name: words.split() for name, words in LAYOUTS.items()}
    for name, options in ({kind.name: kind.words for kind in KINDS} | layouts).items():
        program = "moe.train" if "--moe" in options else "parallel.train"
        words = ["-m", program, *MODEL.split(), "--no-monitor", *options]
        prefix = launch + words if no_mpi is None else [*words, "--threads", "2"]
        yield Step("train " + name.replace(",", ""), prefix, "--json")


def device_tables() -> Iterator[Step]:
    """Yield collectives on devices beside other libraries, with and without MPS."""
    for num_ranks in (2, 4):
        words = ["-m", "bench", "all", "-g", str(num_ranks), *DEVICES.split()]
        yield Step(f"devices {num_ranks}", words, "-J")
        with_mps = ["-m", "bench.gpu.mps", str(LIMIT - PATIENCE), *words]
        yield Step(f"devices {num_ranks} mps", with_mps, "-J")


def launched(num_ranks: int) -> list[str]:
    """Return the words before a command that ranks run."""
    seconds = str(LIMIT - PATIENCE)
    return ["-m", "collectives.launch", "-n", str(num_ranks), "--timeout", seconds]


def all_ended(to_run: Sequence[Step], folder: Path, limits: Limits = LIMITS) -> list[str]:
    """Run steps; return a line for each.  Tests run at the same time, for they take no times."""
    end = time.monotonic() + limits.of_all

    def line_of(step: Step) -> str:
        return ended(step, folder, min(limits.of_one, end - time.monotonic()))

    tests = [step for step in to_run if step.name.startswith(TESTS)]
    others = [step for step in to_run if step not in tests]
    with ThreadPoolExecutor(max(1, len(tests))) as pool:
        lines = list(pool.map(line_of, tests))
    return lines + [line_of(step) for step in others]


def ended(step: Step, folder: Path, seconds: float) -> str:
    """Run a step; return a line with its result, which begins with "ok" if it succeeded."""
    print(f"\n== {step.name}: python {' '.join(step.command)}", flush=True)
    path, began = file_of(step, folder, "txt"), time.monotonic()
    with path.open("w") as file:
        command = [sys.executable, *step.command]
        if step.json is not None:
            (numbers := file_of(step, folder, "json")).unlink(missing_ok=True)  # of another run
            command += [step.json, str(numbers)]
        limit = int(seconds)
        status = status_of(command, file, limit) if limit > 0 else None
        late = f"failed: not done after {limit} s" if limit > 0 else "failed: no time was left"
        how = late if status is None else f"failed with status {status}" if status else "ok"
    print(path.read_text(errors="replace"))
    return f"{how}: {step.name}, {time.monotonic() - began:.0f} s"


def status_of(command: Sequence[str], file: IO[str], limit: float) -> int | None:
    """Run a command; return its status, or None if it had to be ended because it was late."""
    process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **NCCL_SHARES})
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        mps.ended(process, PATIENCE)


def file_of(step: Step, folder: Path, suffix: str) -> Path:
    """Return a file of a step."""
    return folder / f"{step.name.replace(' ', '_')}.{suffix}"


def numbers_of(step: Step, folder: Path) -> Any:
    """Return what a step wrote as numbers, or None."""
    path = file_of(step, folder, "json")
    return json.loads(path.read_text()) if path.exists() else None


def facts() -> dict[str, Any]:
    """Return when and on what it ran."""
    import cupy  # noqa: PLC0415 - only where there is a GPU

    from bench.provenance import provenance  # noqa: PLC0415 - takes the modules

    gpu = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return {"provenance": provenance() | {"gpu": gpu, "cupy": cupy.__version__}}


COMMAND = Command("bench.gpu", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
