"""Time mixtures of experts on the ranks of one job of the moe command.

    ring launch -n 2 -m bench.experts.dispatch_ranks --json times.json

The exit status is 1 if any element of a result is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from bench.commands import world
from bench.commands.options import COUNT, option
from bench.experts.dispatch_results import GATES, HOSTS, PARTS, SLICED, Bytes, Dispatched, Sliced
from bench.experts.dispatch_steps import (
    FP32,
    Alltoallv,
    Copies,
    Forward,
    Size,
    Steps,
    dispatcher_of,
    forward_of,
    gate_of,
    num_wrong,
    routed,
)
from bench.timing.cpu_share import Watch
from bench.timing.interleaved import FEWEST, Effort, times
from collectives import Communicator
from collectives.console import Command, add_json, console_for, write_json
from moe.exchange import Experts
from moe.gates import Gate

WARMUP = 3
SECONDS = 20.0  # after which a case gets no more samples
TINY = Size(tokens=64, dim=32, num_experts=8, hidden=16)


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the ranks."""
    option(parse, "--quick", "few tokens and samples", action="store_true")
    option(parse, "--samples", "of each contender", default=30, **COUNT)
    add_json(parse, is_local=False)


def run(options: argparse.Namespace) -> int:
    """Time all cases; return 0, or 1 if anything is wrong."""
    return world.on_ranks(lambda comm: measured(comm, options))


def measured(comm: Communicator, options: argparse.Namespace) -> int:
    """Time all cases, and let rank 0 write them; return the exit status."""
    world.check_output(options.json)
    samples = FEWEST if options.quick else options.samples
    cases = Ranks(comm, TINY if options.quick else Size(), samples).run()
    if comm.rank == 0:
        write_json({"mpi": world.mpi_version(), **cases}, options.json)
    return int(any(sum(case["wrong"].values()) for case in cases["dispatched"]))


class Ranks:
    """The cases, one after the other."""

    def __init__(self, comm: Communicator, size: Size, samples: int) -> None:
        self.comm, self.size, self.samples = comm, size, samples
        random = np.random.default_rng((7, comm.rank))
        self.x = random.standard_normal((size.tokens, size.dim), FP32)

    def run(self) -> dict[str, list[dict[str, Any]]]:
        """Time all of them; return them for JSON."""
        say, where = console_for(self.comm.rank).print, f"on {self.comm.size} ranks"
        say(f"dispatch and combine {where}")
        dispatched = [self.dispatched(name)._asdict() for name in GATES]
        say(f"parts {where}")
        sliced = [self.sliced(name)._asdict() for name in SLICED]
        num_hosts = self.comm.size // HOSTS
        hosts = [self.between(name)._asdict() for name in GATES if num_hosts > 1]
        return {"dispatched": dispatched, "sliced": sliced, "hosts": hosts}

    def dispatched(self, name: str) -> Dispatched:
        """Time ours beside mpi4py's."""
        gate = gate_of(name, self.size)
        forwards: dict[str, Forward] = {
            "ours": forward_of(dispatcher_of("flat", self.comm, gate, self.size)),
            "Alltoallv": Alltoallv(MPI.COMM_WORLD, gate.num_experts),
        }
        watch = Watch()
        seconds, made = self.timed(gate, forwards)
        wrong = {
            key: int(self.comm.all_reduce(np.array([num_wrong(made[key])]))[0]) for key in forwards
        }
        return Dispatched(name, seconds, wrong, watch.cores())

    def sliced(self, name: str) -> Sliced:
        """Time experts that compute one part while others are sent."""
        gate = gate_of(name, self.size)
        forwards = {
            str(parts): forward_of(
                dispatcher_of("flat", self.comm, gate, self.size, Experts, num_parts=parts)
            )
            for parts in PARTS
        }
        return Sliced(name, self.timed(gate, forwards)[0])

    def timed(
        self, gate: Gate, forwards: Mapping[str, Forward]
    ) -> tuple[dict[str, float], dict[str, Steps]]:
        """Return seconds of each forward pass, in random turns, with the same routings for all."""
        effort = Effort(WARMUP, self.samples, SECONDS)
        num_steps = WARMUP + self.samples + 1  # the last is checked
        routings = [routed(gate, self.size, self.comm.rank, i) for i in range(num_steps)]
        made = {key: Steps(forward, self.x.copy(), routings) for key, forward in forwards.items()}
        medians = times(list(made.values()), None, is_small=False, effort=effort)
        for steps in made.values():
            steps()
        return dict(zip(forwards, medians, strict=True)), made

    def between(self, name: str) -> Bytes:
        """Return the bytes that are recorded between hosts in one forward pass."""
        gate, size = gate_of(name, self.size), self.size
        between, host = {}, np.arange(self.comm.size) // HOSTS
        for dispatch, per_host in (("flat", None), ("hierarchical", HOSTS)):
            forward = forward_of(
                dispatcher_of(dispatch, self.comm, gate, size, Copies, ranks_per_host=per_host)
            )
            with self.comm.record() as ledger:
                forward(self.x, routed(gate, size, self.comm.rank, 0))
            record = ledger.gather()
            if record is not None:
                between[dispatch] = int(record.matrix()[host[:, None] != host].sum())
        return Bytes(name, between)


COMMAND = Command("bench.experts.dispatch_ranks", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
