"""Training runs that are not only another list of actions: servers, and ranks that may die.

All other strategies are values of `parallel.sharding.Sharding`.
"""

from parallel.strategies.async_server import AsyncParameterServer, Staleness
from parallel.strategies.elastic import Elastic, ReplicaMismatch, digest, survive
from parallel.strategies.sync_server import SyncParameterServer

__all__ = [
    "AsyncParameterServer",
    "Elastic",
    "ReplicaMismatch",
    "Staleness",
    "SyncParameterServer",
    "digest",
    "survive",
]
