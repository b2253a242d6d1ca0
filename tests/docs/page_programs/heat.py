"""An mpi4py program: heat in a bar, of which each rank has a part.  For commands of pages."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
start, rate = comm.bcast((1.0, 0.1))
part = np.full(1000, start * comm.rank)
for _ in range(100):
    total = comm.allreduce(part.sum())
    part += rate * (total / (comm.size * part.size) - part)
whole = np.empty(comm.size * part.size) if comm.rank == 0 else None
comm.Gather(part, whole)
