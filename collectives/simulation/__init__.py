"""Simulation: how long the programs of all ranks take on a machine, and what its links carry."""

from collectives.simulation.engine import Simulation, simulate
from collectives.simulation.machine import OTHER_HOST, SAME_HOST, Link, Machine
from collectives.simulation.network import Apart, Level, Network, Torus, Tree

__all__ = [
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
    "simulate",
]
