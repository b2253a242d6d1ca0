"""Measure the backend "ring" of torch.distributed beside PyTorch's own, on the same ranks.

    python -m bench torch -g 2
    python -m bench torch -g 4 --part ddp --part fsdp --hidden 64,512
    python -m bench torch -g 2 --device cuda

PyTorch's own backend is "nccl" for tensors on GPUs if there is a GPU for each rank, else "gloo".

The command starts its own jobs.

1. all_reduce of float32, in place.
2. A training step of a small transformer, with DistributedDataParallel ("ddp") and with
   fully_shard ("fsdp"): forward, backward and SGD.
3. From the start of Python to the end of the first all_reduce ("start"), each time in a new job.
   Gloo's loads neither MPI nor this library.  With --device cuda only if it is asked for by --part.

1 and 2 are measured in one job, in which both backends have a group of all ranks.  They take turns
in random order, each rank has one thread, and times are medians of the slowest rank.  Below 64 KiB
a sample is 40 calls.  A ratio above 1: ours is faster.

The exit status is 1 if a result is wrong, models that were trained by both differ, or something
could not be measured; 2 if there is no torch or no MPI.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import sizes
from bench.docs.provenance import provenance
from bench.jobs import Jobs, has_mpi
from bench.options import Add, add_effort, seconds
from bench.torch import cases, start
from bench.torch.cases import HEADS, PARTS, START, Both
from collectives.export import output_file
from collectives.launch import find_mpirun
from parallel.cli import at_least, console_of, print_table

RANKS = 2
JOB = "calls and steps"
SIZES, HIDDEN = "8,64,512,4K,64K,1M,64M", "32,64,128,192,256"
QUICK = ["--sizes", "8,64K", "--hidden", "32,64", "-n", "3", "-w", "2"]
NO_TORCH = "bench torch: torch is not installed; pip install 'ring-collectives[torch]' has it"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    parser.set_defaults(run=run)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add(
        "-g",
        "--ngpus",
        dest="ranks",
        type=at_least(1),
        default=RANKS,
        metavar="N",
        help="ranks of its jobs, which are started here; default: %(default)s",
    )
    add_measured(add)
    add(
        "--jobs",
        type=at_least(1),
        default=start.JOBS,
        metavar="N",
        help="of each backend, whose start is measured; default: %(default)s",
    )
    add(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds for each of its jobs; default: %(default)s",
    )
    add("-J", "--json", type=output_file, metavar="FILE", help="write everything to FILE")
    add("--quick", action="store_true", help="few sizes and samples, to try the command itself")


def add_measured(add: Add) -> None:
    """What is measured, and how often; the ranks of its first job have these options too."""
    add(
        "--part",
        dest="parts",
        action="append",
        choices=PARTS,
        metavar="PART",
        help=f"only this one of {', '.join(PARTS)}; may be repeated",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where tensors are; cuda takes CuPy; default: %(default)s",
    )
    add(
        "--sizes",
        type=listed(sizes.parse),
        default=SIZES,
        metavar="B,B",
        help="bytes of calls; default: %(default)s",
    )
    add(
        "--hidden",
        type=listed(width),
        default=HIDDEN,
        metavar="N,N",
        help="widths of models; default: %(default)s",
    )
    add_effort(add)


def listed(each: Callable[[str], int]) -> Callable[[str], list[int]]:
    """An argument's type: several of a type, with commas between them."""
    return lambda text: [each(word) for word in text.split(",")]


def width(text: str) -> int:
    """An argument's type: the width of a model, which its heads divide."""
    if not text.isdecimal() or int(text) == 0 or int(text) % HEADS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of {HEADS}, such as 64")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Measure and print.  0, 1 if anything is wrong or not measured, 2 without torch or MPI."""
    console = console_of(0)
    if find_spec("torch") is None:
        console.print(NO_TORCH, markup=False)
        return 2
    if not has_mpi(console):
        return 2
    with TemporaryDirectory() as folder:
        jobs = Jobs(console, Path(folder), options.timeout)
        found = measured(jobs, options)
    mpi = jobs.results.get(JOB, {}).get("mpi", find_mpirun().vendor)
    jobs.title(f"{mpi}, torch {version('torch')}, {options.ranks} ranks, {options.device}")
    for title, table in cases.tables(found):
        console.print(f"\n{title}", markup=False)
        print_table(table, console)
    if options.json is not None:
        result = {"mpi": mpi, "torch": version("torch"), "ranks": options.ranks}
        result["device"] = options.device
        result |= cases.as_dict(found) | {"statuses": jobs.statuses}
        result["provenance"] = provenance(["collectives"])
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(jobs.statuses.values()))


def measured(jobs: Jobs, options: argparse.Namespace) -> dict[str, list[Both]]:
    """What the job of calls and steps finds, and those of the start."""
    parts = options.parts or [name for name in PARTS if name != START or options.device == "cpu"]
    found: dict[str, list[Both]] = {}
    if on_ranks := [part for part in parts if part != START]:
        found |= cases.found_in(jobs.run(JOB, options.ranks, command(on_ranks, options))[1])
    if START in parts:
        count = start.QUICK if options.quick else options.jobs
        found[START] = start.both(jobs, options.ranks, count)
    return found


def command(parts: Sequence[str], options: argparse.Namespace) -> list[str]:
    """What the ranks of the first job run."""
    given = {
        "--sizes": ",".join(map(str, options.sizes)),
        "--hidden": ",".join(map(str, options.hidden)),
        "-n": options.samples,
        "-w": options.warmup,
        "--seconds": f"{options.seconds:g}",
    }
    amounts = [word for name, value in given.items() for word in (name, str(value))]
    chosen = [word for part in parts for word in ("--part", part)]
    chosen += ["--device", options.device]
    return ["-m", "bench.torch.ranks", *chosen, *(QUICK if options.quick else amounts)]
