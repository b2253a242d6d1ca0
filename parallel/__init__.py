"""Parallel training on top of `collectives` that predicts its traffic exactly.

A training run predicts what it sends (`Trainer.traffic`), the library records what it sent, and
MPI's own counters say what left the process: the three are equal to the byte.

    python -m collectives.launch -n 4 -m parallel.train --mesh data=4 --zero 2

Psi is the number of a model's parameters, n(unit) the bytes of a unit (the flat parameter of one
layer), S the number of steps, and k that of micro-batches.
"""

from parallel import checkpoint, cli, nn, pipeline, plan, text
from parallel.accounts import (
    MemoryTracker,
    PredictedCall,
    TrafficMismatch,
    TrafficMonitor,
    TrafficTable,
)
from parallel.actions import Action
from parallel.elastic import Elastic, ReplicaMismatch
from parallel.mesh import Mesh
from parallel.nn import Layer, Model, annotate, gpt
from parallel.optim import SGD, Adam, AdamW, Optimizer
from parallel.placement import Placement
from parallel.places import Disk, HostMemory
from parallel.runtime import (
    MissingGradient,
    ModelMismatch,
    Recipe,
    Trainer,
    raise_on_all_ranks,
)
from parallel.servers import AsyncParameterServer, SyncParameterServer
from parallel.sharding import (
    AllReduce,
    CommHook,
    HalfPrecision,
    Int8Blocks,
    OuterMomentum,
    PowerSGD,
    Sharding,
    choose_group_size,
)
from parallel.tasks import step_tasks

__all__ = [
    "SGD", "Action", "Adam", "AdamW", "AllReduce", "AsyncParameterServer", "CommHook", "Disk",
    "Elastic", "HalfPrecision", "HostMemory", "Int8Blocks", "Layer", "MemoryTracker", "Mesh",
    "MissingGradient", "Model", "ModelMismatch", "Optimizer", "OuterMomentum", "Placement",
    "PowerSGD", "PredictedCall", "Recipe", "ReplicaMismatch", "Sharding", "SyncParameterServer",
    "TrafficMismatch", "TrafficMonitor", "TrafficTable", "Trainer", "annotate", "checkpoint",
    "choose_group_size", "cli", "gpt", "nn", "pipeline", "plan", "raise_on_all_ranks",
    "step_tasks", "text",
]  # fmt: skip
