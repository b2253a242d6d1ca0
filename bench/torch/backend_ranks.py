"""Time the calls and training steps of the torch command on the ranks of one job.

    ring launch -n 2 -m bench.torch.backend_ranks --sizes 8,64K --json times.json

The exit status is 1 if any element of a result is wrong, or if models that were trained by
different backends differ.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from mpi4py import MPI
from torch.distributed.device_mesh import DeviceMesh

from bench.commands import world
from bench.contenders import process_groups
from bench.contenders.contender import Contender, nothing
from bench.contenders.side_by_side import outcomes
from bench.timing.interleaved import Effort, times
from bench.torch.backends import add_measured
from bench.torch.results import CALLS, DDP, FSDP, Both
from bench.torch.strategies import ddp, fsdp
from bench.torch.transformer import Sizes, TrainingStep, num_wrong, transformer
from bench.workloads.collective import Buffers, Case, in_place
from bench.workloads.sizes import text, whole_blocks
from collectives import Communicator
from collectives.console import Command, add_json, console_for, write_json
from collectives.torch import communicator

FP32 = np.dtype("float32")
World = MPI.COMM_WORLD
KINDS = {DDP: ddp, FSDP: fsdp}


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the ranks."""
    add_measured(parse)
    add_json(parse, is_local=False)


def run(options: argparse.Namespace) -> int:
    """Time all cases; return 0, or 1 if anything is wrong."""
    return world.on_ranks(lambda comm: measured(comm, options))


def measured(comm: Communicator, options: argparse.Namespace) -> int:
    """Time all cases, and let rank 0 write them; return the exit status."""
    world.check_output(options.json)
    cases_by_part = Ranks(options).run()
    if comm.rank == 0:
        parts = {name: [case._asdict() for case in cases] for name, cases in cases_by_part.items()}
        write_json({"mpi": world.mpi_version(), **parts}, options.json)
    process_groups.leave()
    return int(any(case.wrong for cases in cases_by_part.values() for case in cases))


class Ranks:
    """The cases, one after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.effort = Effort(options.warmup, options.samples, options.seconds)
        self.groups = process_groups.join_all(options.device)
        self.backend = world.backend(communicator(), options.device)

    def run(self) -> dict[str, list[Both]]:
        """Time all of them; return them by part."""
        options, say = self.options, console_for(World.rank).print
        cases_by_part: dict[str, list[Both]] = {}
        if CALLS in options.parts:
            say("all_reduce of " + ", ".join(map(text, options.sizes)))
            cases_by_part[CALLS] = [self.called(size) for size in options.sizes]
        for kind in KINDS:
            if kind in options.parts:
                say(f"{kind} of hidden " + ", ".join(map(str, options.hidden)))
                cases_by_part[kind] = [self.trained(kind, hidden) for hidden in options.hidden]
        return cases_by_part

    def called(self, num_bytes: int) -> Both:
        """Time an all-reduce by every group, on the same buffer."""
        num_elements = whole_blocks(num_bytes, FP32.itemsize, num_blocks=1)
        case = Case("all_reduce", World.rank, World.size, num_elements, FP32, backend=self.backend)
        buffers = in_place(case)
        assert buffers is not None, "an all-reduce can be in place"
        made = [contender(buffers, group) for group in self.groups.values()]
        results = outcomes(case, buffers, made, self.effort)
        seconds = {name: result.seconds for name, result in zip(self.groups, results, strict=True)}
        return Both(case.num_bytes, seconds, sum(result.wrong or 0 for result in results))

    def trained(self, kind: str, hidden: int) -> Both:
        """Time a training step by every group, each with a model of its own."""
        device = self.options.device
        steps = {
            name: training_step(kind, hidden, group, device) for name, group in self.groups.items()
        }
        medians = times(list(steps.values()), None, is_small=False, effort=self.effort)
        wrong = int(World.allreduce(num_wrong(steps)))
        return Both(hidden, dict(zip(steps, medians, strict=True)), wrong)


def contender(buffers: Buffers, group: Any) -> Contender:
    """Return a group's all-reduce, in place as all of PyTorch's are."""
    assert buffers.x is not None, "every rank of an all-reduce has an input"
    return Contender(process_groups.all_reduce(buffers.x, group), nothing, buffers.x)


def training_step(kind: str, hidden: int, group: Any, device: str) -> TrainingStep:
    """Return the step of a model that is divided among a group; ranks have their own tokens."""
    sizes, mesh = Sizes(hidden), DeviceMesh.from_group(group, device)
    model = KINDS[kind](transformer(sizes).to(device), mesh)
    return TrainingStep(model, sizes, seed=World.rank, device=device)


COMMAND = Command("bench.torch.backend_ranks", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
