"""Routing: which experts compute which tokens, as a table of choices, and a log of such tables.

All traffic of a layer with experts follows from its routing.
"""

from moe.routing.log import RoutingLog
from moe.routing.routing import Flags, Integers, Routing, Values, joined, slots_of

__all__ = ["Flags", "Integers", "Routing", "RoutingLog", "Values", "joined", "slots_of"]
