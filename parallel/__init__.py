"""Parallel training strategies on top of `collectives`, each of which shows its traffic.

Every strategy states what it will send (`traffic`), the library records what it sent, and MPI's own
counters say what really left: three columns that must be equal to the byte.

    python -m collectives.launch -n 4 -m parallel.train --strategy zero2
"""

from parallel import checkpoint, text
from parallel.agreement import ModelsDiffer
from parallel.data import AllReduce, DataParallel, Hook
from parallel.elastic import Elastic, ReplicasDiffer
from parallel.gpt import gpt
from parallel.hooks import Compressed, Int8Blocks, PowerSGD
from parallel.hsdp import Hsdp
from parallel.memory import Memory
from parallel.nn import Layer, Model
from parallel.offload import Disk, Host
from parallel.optim import SGD, Adam, AdamW, Optimizer
from parallel.server import ServerAsync, ServerSync
from parallel.strategy import NoGradient, Recipe, Strategy
from parallel.traffic import PredictedCall, TrafficMismatch, TrafficTable, Witness
from parallel.zero import Zero1, Zero2, Zero3
from parallel.zeropp import ZeroPlusPlus

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "AllReduce",
    "Compressed",
    "DataParallel",
    "Disk",
    "Elastic",
    "Hook",
    "Host",
    "Hsdp",
    "Int8Blocks",
    "Layer",
    "Memory",
    "Model",
    "ModelsDiffer",
    "NoGradient",
    "Optimizer",
    "PowerSGD",
    "PredictedCall",
    "Recipe",
    "ReplicasDiffer",
    "ServerAsync",
    "ServerSync",
    "Strategy",
    "TrafficMismatch",
    "TrafficTable",
    "Witness",
    "Zero1",
    "Zero2",
    "Zero3",
    "ZeroPlusPlus",
    "checkpoint",
    "gpt",
    "text",
]
