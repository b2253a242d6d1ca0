"""How jobs start and end: which mpirun to use, what its ranks do, which of them died.

Only `python -m collectives.launch` needs it; a plain mpirun works as well.
"""

from collectives.launch.job import TIMED_OUT, launch

__all__ = ["TIMED_OUT", "launch"]
