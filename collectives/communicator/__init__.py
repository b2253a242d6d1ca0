"""The communicator of the user, with its collectives, plans, groups and ledgers.

It checks the arguments of a call, and describes the call for the runtime.
"""

from collectives.communicator.calls import SentReceived
from collectives.communicator.communicator import Communicator
from collectives.communicator.entry import adopt, adopt_child, follow, mode_of, run, world, wrap

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
