"""Times the calls and training steps of the torch command on the ranks of one job.

    python -m collectives.launch -n 2 -m bench.torch.ranks --sizes 8,64K --json times.json

The exit status is 1 if any element of a result is wrong, or if models that were trained by
different backends differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI
from torch.distributed.device_mesh import DeviceMesh

from bench.case import Buffers, Case, in_place
from bench.others import FP32
from bench.perf import backend, check_output, mpi_version
from bench.side_by_side import outcomes
from bench.sizes import text, whole_blocks
from bench.timing import Effort, times
from bench.torch import groups
from bench.torch.cases import CALLS, DDP, FSDP, Both
from bench.torch.command import add_measured
from bench.torch.models import Sizes, transformer
from bench.torch.steps import TrainingStep, num_wrong
from bench.torch.strategies import ddp, fsdp
from bench.ways import Contender, nothing
from collectives.torch import communicator
from parallel.cli import console_of

World = MPI.COMM_WORLD
KINDS = {DDP: ddp, FSDP: fsdp}


def main(arguments: list[str] | None = None) -> int:
    """Time all cases.  0, 1 if anything is wrong."""
    parse = parser()
    options = parse.parse_args(arguments)
    try:
        check_output(options.json)
    except ValueError as error:
        parse.error(str(error))
    try:
        ranks = Ranks(options)
    except ValueError as error:
        parse.error(str(error))
    found = ranks.run()
    if World.rank == 0:
        cases = {name: [each._asdict() for each in both] for name, both in found.items()}
        options.json.write_text(json.dumps({"mpi": mpi_version(), **cases}))
    groups.leave()
    World.Barrier()  # a launcher may end the job at the first failing rank; let rank 0 write
    return int(any(each.wrong for cases in found.values() for each in cases))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser("python -m bench.torch.ranks", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument("--json", type=Path, required=True, metavar="FILE", help="for the times")
    add_measured(parse.add_argument)
    return parse


class Ranks:
    """The cases, one after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.effort = Effort(options.warmup, options.samples, options.seconds)
        self.groups = groups.join_all(options.device)
        self.backend = backend(communicator(), options.device)

    def run(self) -> dict[str, list[Both]]:
        """All of them."""
        options, say = self.options, console_of(World.rank).print
        found: dict[str, list[Both]] = {}
        if CALLS in options.parts:
            say("all_reduce of " + ", ".join(map(text, options.sizes)))
            found[CALLS] = [self.called(size) for size in options.sizes]
        for kind in KINDS:
            if kind in options.parts:
                say(f"{kind} of hidden " + ", ".join(map(str, options.hidden)))
                found[kind] = [self.trained(kind, hidden) for hidden in options.hidden]
        return found

    def called(self, num_bytes: int) -> Both:
        """An all-reduce by every group, on the same buffer."""
        num_elements = whole_blocks(num_bytes, FP32.itemsize, num_blocks=1)
        case = Case("all_reduce", World.rank, World.size, num_elements, FP32, backend=self.backend)
        buffers = in_place(case)
        assert buffers is not None, "an all-reduce can be in place"
        made = [contender(buffers, group) for group in self.groups.values()]
        found = outcomes(case, buffers, made, self.effort)
        seconds = {name: each.seconds for name, each in zip(self.groups, found, strict=True)}
        return Both(case.num_bytes, seconds, sum(each.wrong or 0 for each in found))

    def trained(self, kind: str, hidden: int) -> Both:
        """A training step by every group, each with a model of its own."""
        device = self.options.device
        steps = {
            name: training_step(kind, hidden, group, device) for name, group in self.groups.items()
        }
        found = times(list(steps.values()), None, is_small=False, effort=self.effort)
        wrong = int(World.allreduce(num_wrong(steps)))
        return Both(hidden, dict(zip(steps, found, strict=True)), wrong)


def contender(buffers: Buffers, group: Any) -> Contender:
    """A group's all-reduce, in place as all of PyTorch's are."""
    assert buffers.x is not None, "every rank of an all-reduce has an input"
    return Contender(groups.all_reduce(buffers.x, group), nothing, buffers.x)


def training_step(kind: str, hidden: int, group: Any, device: str) -> TrainingStep:
    """Of a model that is divided among a group; every rank has tokens of its own."""
    sizes, mesh = Sizes(hidden), DeviceMesh.from_group(group, device)
    model = KINDS[kind](transformer(sizes).to(device), mesh)
    return TrainingStep(model, sizes, seed=World.rank, device=device)


if __name__ == "__main__":
    sys.exit(main())
