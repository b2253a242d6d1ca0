"""TODO."""

from collectives.communicator.communicator import Communicator
from collectives.communicator.entry import adopt, mode_of, run, world, wrap

__all__ = ["Communicator", "adopt", "mode_of", "run", "world", "wrap"]
