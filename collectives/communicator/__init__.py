"""What the user holds: a communicator with its collectives, plans, groups and ledgers.

From the arguments of a call to what the runtime runs.
"""

from collectives.communicator.communicator import Communicator
from collectives.communicator.entry import adopt, mode_of, run, world, wrap

__all__ = ["Communicator", "adopt", "mode_of", "run", "world", "wrap"]
