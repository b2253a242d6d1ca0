"""Times mixtures of experts on the ranks of one job of the moe command.

    python -m collectives.launch -n 2 -m bench.moe_ranks --json times.json

The exit status is 1 if any element of a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import collectives
from bench.moe_cases import GATES, HOSTS, PARTS, SLICED, Bytes, Dispatched, Sliced
from bench.moe_steps import (
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
from bench.perf import check_output, mpi_version
from bench.sweep import Watch
from bench.timing import FEWEST, Effort, times
from collectives import Communicator
from moe.exchange import Experts
from moe.gates import Gate
from parallel.cli import console_of

WARMUP = 3
SECONDS = 20.0  # after which a case gets no more samples
TINY = Size(tokens=64, dim=32, num_experts=8, hidden=16)


def main(arguments: list[str] | None = None) -> int:
    """Time all cases.  0, 1 if anything is wrong."""
    parse = parser()
    options = parse.parse_args(arguments)
    comm = collectives.world()
    try:
        check_output(options.json)
    except ValueError as error:
        parse.error(str(error))
    samples = FEWEST if options.quick else options.samples
    ranks = Ranks(comm, TINY if options.quick else Size(), samples)
    cases = ranks.run()
    if comm.rank == 0:
        options.json.write_text(json.dumps({"mpi": mpi_version(), **cases}))
    comm.barrier()  # a launcher may end the job at the first failing rank; let rank 0 write
    return int(any(sum(case["wrong"].values()) for case in cases["dispatched"]))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser("python -m bench.moe_ranks", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument("--json", type=Path, required=True, metavar="FILE", help="for the times")
    parse.add_argument("--quick", action="store_true", help="few tokens and samples")
    parse.add_argument("--samples", type=int, default=30, metavar="N", help="of each contender")
    return parse


class Ranks:
    """The cases, one after the other."""

    def __init__(self, comm: Communicator, size: Size, samples: int) -> None:
        self.comm, self.size, self.samples = comm, size, samples
        random = np.random.default_rng((7, comm.rank))
        self.x = random.standard_normal((size.tokens, size.dim), FP32)

    def run(self) -> dict[str, list[dict[str, Any]]]:
        """All of them, for JSON."""
        say, where = console_of(self.comm.rank).print, f"on {self.comm.size} ranks"
        say(f"dispatch and combine {where}")
        dispatched = [self.dispatched(name)._asdict() for name in GATES]
        say(f"parts {where}")
        sliced = [self.sliced(name)._asdict() for name in SLICED]
        num_hosts = self.comm.size // HOSTS
        hosts = [self.between(name)._asdict() for name in GATES if num_hosts > 1]
        return {"dispatched": dispatched, "sliced": sliced, "hosts": hosts}

    def dispatched(self, name: str) -> Dispatched:
        """Ours beside mpi4py's."""
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
        """Experts that compute one part while others are sent."""
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
        """Seconds of each forward pass, in random turns, with the same routings for all."""
        effort = Effort(WARMUP, self.samples, SECONDS)
        num_steps = WARMUP + self.samples + 1  # the last is checked
        routings = [routed(gate, self.size, self.comm.rank, i) for i in range(num_steps)]
        made = {key: Steps(each, self.x.copy(), routings) for key, each in forwards.items()}
        found = times(list(made.values()), None, is_small=False, effort=effort)
        for each in made.values():
            each()
        return dict(zip(forwards, found, strict=True)), made

    def between(self, name: str) -> Bytes:
        """The bytes that are recorded between hosts in one forward pass."""
        gate, size = gate_of(name, self.size), self.size
        found, host = {}, np.arange(self.comm.size) // HOSTS
        for dispatch, per_host in (("flat", None), ("hierarchical", HOSTS)):
            forward = forward_of(
                dispatcher_of(dispatch, self.comm, gate, size, Copies, ranks_per_host=per_host)
            )
            with self.comm.record() as ledger:
                forward(self.x, routed(gate, size, self.comm.rank, 0))
            record = ledger.gather()
            if record is not None:
                found[dispatch] = int(record.matrix()[host[:, None] != host].sum())
        return Bytes(name, found)


if __name__ == "__main__":
    sys.exit(main())
