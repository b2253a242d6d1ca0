"""mpi4py's spelling of the collectives: an `MPI.Intracomm` whose calls this library makes."""

from collectives.mpi4py_compat.intracomm import Intracomm

__all__ = ["Intracomm"]
