"""Run by test_cluster.py: what the ledger records between hosts, and what their interfaces count.

Prints, as JSON, the hosts that were found, and the bytes that each sent to others, both ways; one
line for each argument.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import collectives
from collectives import Communicator

CALLS: list[Callable[[Communicator], object]] = [
    lambda comm: comm.all_reduce(np.ones(2**20, np.float32)),
    lambda comm: comm.reduce_scatter(np.ones((comm.size, 2**18), np.float32)),
    lambda comm: comm.all_gather(np.ones(2**18, np.float32)),
    lambda comm: comm.all_to_all(np.ones((comm.size, 2**16), np.float32)),
    lambda comm: comm.broadcast(np.ones(2**19, np.float32)),
]


def sent_by_interface() -> int:
    """The bytes that the network interface of this host has sent since it exists."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (found,) = (line for line in lines if line.strip().startswith("eth0:"))
    return int(found.split(":")[1].split()[8])


def measure(comm: Communicator, recorded_share: float) -> None:
    """`recorded_share`: of the calls, how many are recorded; less than all is a wrong ledger."""
    comm.barrier()
    before = sent_by_interface()
    comm.barrier()
    with comm.record() as ledger:
        for call in CALLS[: round(len(CALLS) * recorded_share)]:
            call(comm)
    for call in CALLS[round(len(CALLS) * recorded_share) :]:
        call(comm)
    comm.barrier()
    counted = sent_by_interface() - before
    counts, whole = comm.gather(np.array([counted]), root=0), ledger.gather()
    if counts is not None and whole is not None:
        sent = whole.host_matrix()
        recorded = (sent.sum(axis=1) - sent.diagonal()).tolist()
        observed = [int(counts[ranks[0]]) for ranks in comm.topology.hosts]
        hosts = str(comm.topology)
        print(json.dumps({"recorded": recorded, "observed": observed, "hosts": hosts}))


if __name__ == "__main__":
    world = collectives.world()
    for argument in sys.argv[1:]:
        measure(world, float(argument))
