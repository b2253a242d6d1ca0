"""TODO."""

from collectives.launch.job import TIMED_OUT, launch

__all__ = ["TIMED_OUT", "launch"]
