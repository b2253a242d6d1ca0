"""Parallel training strategies on top of `collectives` that predict their traffic exactly.

Every strategy predicts what it sends (`Strategy.traffic`), the library records what it sent, and
MPI's own counters say what left the process: the three are equal to the byte.

    python -m collectives.launch -n 4 -m parallel.train --strategy zero2

Psi is the number of a model's parameters, n(unit) the bytes of a unit (the flat parameter of one
layer), S the number of steps, and k that of micro-batches.
"""

from parallel import checkpoint, cli, text
from parallel.agreement import ModelMismatch, raise_on_all_ranks
from parallel.comm_hooks import HalfPrecision, Int8Blocks, PowerSGD
from parallel.data_parallel import AllReduce, CommHook, DataParallel
from parallel.elastic import Elastic, ReplicaMismatch
from parallel.gpt import gpt
from parallel.hsdp import HSDP, choose_group_size
from parallel.memory import MemoryTracker
from parallel.nn import Layer, Model
from parallel.offload import DiskOffload, HostOffload
from parallel.optim import SGD, Adam, AdamW, Optimizer
from parallel.parameter_server import AsyncParameterServer, SyncParameterServer
from parallel.strategy import MissingGradient, Recipe, Strategy
from parallel.traffic import PredictedCall, TrafficMismatch, TrafficMonitor, TrafficTable
from parallel.zero import Zero1, Zero2, Zero3
from parallel.zero_plus_plus import ZeroPlusPlus

__all__ = [
    "HSDP",
    "SGD",
    "Adam",
    "AdamW",
    "AllReduce",
    "AsyncParameterServer",
    "CommHook",
    "DataParallel",
    "DiskOffload",
    "Elastic",
    "HalfPrecision",
    "HostOffload",
    "Int8Blocks",
    "Layer",
    "MemoryTracker",
    "MissingGradient",
    "Model",
    "ModelMismatch",
    "Optimizer",
    "PowerSGD",
    "PredictedCall",
    "Recipe",
    "ReplicaMismatch",
    "Strategy",
    "SyncParameterServer",
    "TrafficMismatch",
    "TrafficMonitor",
    "TrafficTable",
    "Zero1",
    "Zero2",
    "Zero3",
    "ZeroPlusPlus",
    "checkpoint",
    "choose_group_size",
    "cli",
    "gpt",
    "raise_on_all_ranks",
    "text",
]
