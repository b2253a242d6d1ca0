"""Simulation: how long the programs of all ranks take on a machine, and what its links carry."""

from collectives.simulation.engine import Simulation, simulate
from collectives.simulation.machine import (
    ISLAND,
    LINK_CLASSES,
    OTHER_HOST,
    SAME_HOST,
    Link,
    Machine,
)
from collectives.simulation.network import Apart, Level, Network, Torus, Tree
from collectives.simulation.tables import work_rates
from collectives.simulation.topology import network_of

__all__ = [
    "ISLAND",
    "LINK_CLASSES",
    "OTHER_HOST",
    "SAME_HOST",
    "Apart",
    "Level",
    "Link",
    "Machine",
    "Network",
    "Simulation",
    "Torus",
    "Tree",
    "network_of",
    "simulate",
    "work_rates",
]
