"""Parallel training strategies on top of `collectives`, each of which shows its traffic.

Every strategy states what it will send (`traffic`), the library records what it sent, and MPI's own
counters say what really left: three columns that must be equal to the byte.

    python -m collectives.launch -n 4 -m parallel.train --strategy ddp
"""

from parallel.data import DataParallel, Serial
from parallel.elastic import Elastic, ReplicasDiffer
from parallel.nn import Model, byte_model
from parallel.optim import Adam
from parallel.traffic import PredictedCall, TrafficMismatch, TrafficTable, Witness

__all__ = [
    "Adam", "DataParallel", "Elastic", "Model", "PredictedCall", "ReplicasDiffer", "Serial",
    "TrafficMismatch", "TrafficTable", "Witness", "byte_model",
]  # fmt: skip
