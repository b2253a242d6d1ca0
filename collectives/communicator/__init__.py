"""The communicator of the user, with its collectives, plans, groups and ledgers.

It checks the arguments of a call, and describes the call for the runtime.
"""

from collectives.communicator.communicator import Communicator
from collectives.communicator.entry import adopt, adopt_child, follow, mode_of, run, world, wrap
from collectives.communicator.exchange import SentReceived

__all__ = [
    "Communicator",
    "SentReceived",
    "adopt",
    "adopt_child",
    "follow",
    "mode_of",
    "run",
    "world",
    "wrap",
]
