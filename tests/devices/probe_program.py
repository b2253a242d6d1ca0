"""What `python -m collectives.doctor --device-pointers` does, on the fake GPU.

Its arguments are a fault of rank 1 in its message of 64 KiB, or "none", and seconds for the job.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.doctor.__main__ import COMMAND, report
from collectives.doctor.device_pointers import device_pointers
from collectives.doctor.exchange import run
from tests.fakes.device import BACKEND


class Faulty:
    """A communicator of an MPI that fails for messages of one size."""

    def __init__(self, comm: Any, fault: str) -> None:
        self.rank, self.Irecv = comm.rank, comm.Irecv
        self._comm, self._fault = comm, fault

    def Isend(self, data: np.ndarray, peer: int) -> Any:  # noqa: N802 - mpi4py's name
        if self.rank == 1 and data.size == 2**16:
            if self._fault == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            while self._fault == "hang":
                time.sleep(1)
            data[-1] += self._fault == "corrupt"
        return self._comm.Isend(data, peer)


def main(fault: str, seconds: float) -> int:
    """Start the job, or be one of its ranks."""
    if seconds == 0:
        return run(Faulty(MPI.COMM_WORLD, fault), BACKEND)
    finding = device_pointers([__file__, fault, "0"], seconds)
    return report([finding], COMMAND.parser().parse_args([]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
