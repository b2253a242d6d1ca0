"""Parameter servers: other runtimes, in which rank 0 alone updates the model."""

from parallel.servers.asynchronous import AsyncParameterServer, Staleness
from parallel.servers.synchronous import SyncParameterServer

__all__ = ["AsyncParameterServer", "Staleness", "SyncParameterServer"]
