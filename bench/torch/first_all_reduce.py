"""Measure how long PyTorch takes from the start of Python to the end of its first all_reduce.

    ring launch -n 2 -m bench.torch.first_all_reduce --backend ring --json FILE

Each backend needs a job of its own, because only the first call of a process counts.  The ranks
replace themselves by a Python that has imported nothing yet.  "ring" finds the ranks through MPI.
"gloo" is told them as torchrun tells them, and neither MPI nor this library is loaded.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from random import Random
from statistics import median
from typing import NoReturn

from bench.commands.jobs import Jobs
from bench.commands.options import COUNT, option
from bench.contenders.contender import GLOO
from bench.torch.results import BACKENDS, START, Both
from collectives.console import Command, add_json
from collectives.launch import bootstrap

JOBS = 5  # of each backend
HOST = "127.0.0.1"

_PROGRAM = """
import json, sys, time
began, backend, path = sys.argv[1:]
import torch
from torch import distributed
if backend == "ring":
    import collectives.torch
distributed.init_process_group(backend)
distributed.all_reduce(torch.ones(2))
taken = torch.tensor(time.monotonic() - float(began), dtype=torch.float64)
distributed.all_reduce(taken, distributed.ReduceOp.MAX)
if distributed.get_rank() == 0:
    with open(path, "w") as file:
        json.dump({"seconds": taken.item()}, file)
distributed.destroy_process_group()
"""


def both(jobs: Jobs, ranks: int, count: int) -> list[Both]:
    """Return the medians over jobs of each backend, which take turns; [] if one has failed."""
    seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
    turns, shuffle = list(BACKENDS), Random(0).shuffle
    for number in range(count):
        shuffle(turns)
        for backend in turns:
            status, result = jobs.run(f"{START} {backend} {number}", ranks, command(backend, ranks))
            if status:
                return []
            seconds[backend].append(result["seconds"])
    return [Both(ranks, {name: median(taken) for name, taken in seconds.items()})]


def command(backend: str, ranks: int) -> list[str]:
    """Return what the ranks of a job run."""
    words = ["-m", "bench.torch.first_all_reduce", "--backend", backend]
    return words if backend != GLOO else [*words, "--ranks", str(ranks), "--port", str(free_port())]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the ranks."""
    parse.add_argument("--backend", choices=BACKENDS, required=True)
    option(parse, "--ranks", "of the job; for gloo", **COUNT)
    option(parse, "--port", "at which rank 0 listens; for gloo", **COUNT)
    add_json(parse, is_local=False)


def run(options: argparse.Namespace) -> NoReturn:
    """Become the program that is measured."""
    more = as_torchrun(options) if options.backend == GLOO else {}
    bootstrap.leave()  # the launcher would take what follows for a death
    began = str(time.monotonic())
    words = [sys.executable, "-c", _PROGRAM, began, options.backend, str(options.json)]
    os.execve(sys.executable, words, os.environ | more)


def as_torchrun(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables by which ranks find each other without MPI."""
    rank = next(os.environ[name] for name in bootstrap.RANK_VARIABLES if name in os.environ)
    where = {"MASTER_ADDR": HOST, "MASTER_PORT": str(options.port)}
    who = {"RANK": rank, "WORLD_SIZE": str(options.ranks)}
    return {**where, **who, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


COMMAND = Command("bench.torch.first_all_reduce", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
