"""Simulation: how long the programs of all ranks take on a machine, and what its links carry."""

from collectives.simulation.calls import Call, simulate_call
from collectives.simulation.devices import DeviceLink, simulate_devices
from collectives.simulation.engine import Simulation, simulate
from collectives.simulation.machine import (
    DEFAULT,
    ISLAND,
    LINK_CLASSES,
    OTHER_HOST,
    SAME_HOST,
    Link,
    Machine,
)
from collectives.simulation.network import Apart, Level, Network, Torus, Tree
from collectives.simulation.picture import picture
from collectives.simulation.tables import work_rates
from collectives.simulation.topology import TOPOLOGIES, network_of

__all__ = [
    "DEFAULT",
    "ISLAND",
    "LINK_CLASSES",
    "OTHER_HOST",
    "SAME_HOST",
    "TOPOLOGIES",
    "Apart",
    "Call",
    "DeviceLink",
    "Level",
    "Link",
    "Machine",
    "Network",
    "Simulation",
    "Torus",
    "Tree",
    "network_of",
    "picture",
    "simulate",
    "simulate_call",
    "simulate_devices",
    "work_rates",
]
