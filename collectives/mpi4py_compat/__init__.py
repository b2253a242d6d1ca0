"""The drop-in for mpi4py: an `MPI.Intracomm` whose collectives are this library's.

It converts mpi4py's buffers, operations and requests to the library's arrays, operators and works.
"""

from collectives.mpi4py_compat.intracomm import Intracomm
from collectives.mpi4py_compat.traffic import Traffic
from collectives.mpi4py_compat.world import replace_world

__all__ = ["Intracomm", "Traffic", "replace_world"]
