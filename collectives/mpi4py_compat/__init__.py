"""TODO."""

from collectives.mpi4py_compat.intracomm import Intracomm

__all__ = ["Intracomm"]
