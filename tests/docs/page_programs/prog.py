"""A program of several ranks that sums arrays.  For commands of pages."""

import numpy as np

import collectives

comm = collectives.world()
for step in range(3):
    gradients = comm.all_reduce(np.full(1000, float(step)))
print(comm.rank, comm.size, gradients[0])
