"""Starts MPI jobs and ends them: finds mpirun, monitors the ranks, and reports which rank died.

Only `ring launch` needs it; a plain mpirun works too.
"""

from collectives.launch.job import TIMED_OUT, launch
from collectives.launch.mpirun import MpiNotFound, Mpirun, find_mpirun

__all__ = ["TIMED_OUT", "MpiNotFound", "Mpirun", "find_mpirun", "launch"]
