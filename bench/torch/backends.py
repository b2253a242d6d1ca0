"""Measure the backend "ring" of torch.distributed beside PyTorch's own, on the same ranks.

    ring bench torch -g 2
    ring bench torch -g 4 --part ddp --part fsdp --hidden 64,512
    ring bench torch -g 2 --device cuda

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
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec

from bench.commands.jobs import Jobs, starting_jobs
from bench.commands.options import (
    COUNT,
    add_device,
    add_jobs,
    add_output,
    add_samples,
    as_words,
    option,
)
from bench.provenance import provenance
from bench.torch import first_all_reduce, results
from bench.torch.results import HEADS, PARTS, START, Both
from bench.workloads import sizes
from collectives.console import Command, Refused, console_for, write_json
from collectives.launch import find_mpirun

JOB = "calls and steps"
SIZES, HIDDEN = "8,64,512,4K,64K,1M,64M", "32,64,128,192,256"
QUICK = ["--sizes", "8,64K", "--hidden", "32,64", "-n", "3", "-w", "2"]
NO_TORCH = "torch is not installed; pip install torch"


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    about = "ranks of its jobs, which are started here"
    option(parse, "-g --ngpus", about, dest="ranks", default=2, **COUNT)
    add_measured(parse)
    about = "jobs of each backend, whose start is measured"
    option(parse, "--jobs", about, default=first_all_reduce.JOBS, **COUNT)
    add_jobs(parse, 600.0)
    add_output(parse)


def add_measured(parse: argparse.ArgumentParser) -> None:
    """Add what is measured, and how often: the options that the ranks have, too."""
    about = f"only this one of {', '.join(PARTS)}; may be repeated"
    more = {"dest": "parts", "action": "append", "choices": PARTS, "metavar": "PART"}
    option(parse, "--part", about, **more)
    add_device(parse)
    about = "bytes of calls"
    option(parse, "--sizes", about, type=listed(sizes.parse), default=SIZES, metavar="B,B")
    about = "widths of models"
    option(parse, "--hidden", about, type=listed(width), default=HIDDEN, metavar="N,N")
    add_samples(parse, seconds=5.0)


def listed(kind: Callable[[str], int]) -> Callable[[str], list[int]]:
    """Return an argument type: several values of a type, with commas between them."""
    return lambda text: [kind(word) for word in text.split(",")]


def width(text: str) -> int:
    """Return the width of a model, which its heads divide; an argument type."""
    if not text.isdecimal() or int(text) == 0 or int(text) % HEADS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of {HEADS}, such as 64")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 0, or 1 if anything is wrong or not measured.  Raises Refused."""
    require_torch()
    with starting_jobs(console_for(0, options), options) as jobs:
        cases_by_part = measured(jobs, options)
    mpi = jobs.results.get(JOB, {}).get("mpi", find_mpirun().vendor)
    jobs.title(f"{mpi}, torch {version('torch')}, {options.ranks} ranks, {options.device}")
    jobs.show(results.tables(cases_by_part))
    result = {"mpi": mpi, "torch": version("torch"), "ranks": options.ranks}
    result |= {"device": options.device, **results.as_dict(cases_by_part)}
    write_json(result | {"statuses": jobs.statuses, "provenance": provenance()}, options.json)
    return int(any(jobs.statuses.values()))


def require_torch() -> None:
    """Raise Refused if PyTorch is not installed."""
    if find_spec("torch") is None:
        raise Refused(NO_TORCH)


def measured(jobs: Jobs, options: argparse.Namespace) -> dict[str, list[Both]]:
    """Return what the job of calls and steps finds, and those of the start."""
    parts = options.parts or [name for name in PARTS if name != START or options.device == "cpu"]
    cases_by_part: dict[str, list[Both]] = {}
    if on_ranks := [part for part in parts if part != START]:
        _, result = jobs.run(JOB, options.ranks, command(on_ranks, options))
        cases_by_part |= results.cases_in(result)
    if START in parts:
        count = 1 if options.quick else options.jobs
        cases_by_part[START] = first_all_reduce.both(jobs, options.ranks, count)
    return cases_by_part


def command(parts: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Return what the ranks of the first job run."""
    given = {
        "--sizes": ",".join(map(str, options.sizes)),
        "--hidden": ",".join(map(str, options.hidden)),
        "-n": options.samples,
        "-w": options.warmup,
        "--seconds": f"{options.seconds:g}",
    }
    amounts = [word for name, value in given.items() for word in (name, str(value))]
    chosen = [*as_words("--part", list(parts)), "--device", options.device]
    return ["-m", "bench.torch.backend_ranks", *chosen, *(QUICK if options.quick else amounts)]


COMMAND = Command("bench.torch.backends", __doc__, add_options, run)
