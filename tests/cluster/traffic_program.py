"""Run by test_cluster.py: what the ledger records between hosts, and what their interfaces count.

Prints, as JSON, the bytes that each host sent to others, both ways.
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


def main(per_host: int, recorded_share: float) -> None:
    """`recorded_share`: of the calls, how many are recorded; less than all is a wrong ledger."""
    comm = collectives.world()
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
    host = np.arange(comm.size) // per_host
    away = int(ledger.matrix()[comm.rank, host != host[comm.rank]].sum())
    found = comm.gather(np.array([[away, counted]]), root=0)
    if comm.rank == 0:
        assert found is not None
        hosts = found.reshape(-1, per_host, 2)
        recorded, observed = hosts[:, :, 0].sum(axis=1), hosts[:, 0, 1]
        print(json.dumps({"recorded": recorded.tolist(), "observed": observed.tolist()}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
