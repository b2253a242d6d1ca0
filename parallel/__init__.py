"""Parallel training on top of `collectives` that predicts its traffic exactly.

A training run predicts what it sends (`Trainer.traffic`), the library records what it sent, and
MPI's own counters say what left the process: the three are equal to the byte.

    ring launch -n 4 -m parallel.train --mesh data=4 --zero 2

Psi is the number of a model's parameters, n(unit) the bytes of a unit (the flat parameter of one
layer), S the number of steps, and k the number of micro-batches.
"""

from parallel import checkpoint, commands, inference, nn, pipeline, plan, text
from parallel.accounts import (
    MemoryTracker,
    PredictedCall,
    TrafficMismatch,
    TrafficMonitor,
    TrafficTable,
)
from parallel.layout import Layout, RankView, Recipe
from parallel.mesh import Mesh, Placement
from parallel.nn import Layer, Model, annotate, gpt
from parallel.optim import SGD, Adam, AdamW, Disk, HostMemory, Optimizer
from parallel.predict import step_tasks
from parallel.run import MissingGradient, ModelMismatch, Trainer, raise_on_all_ranks
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
from parallel.step import Action
from parallel.strategies import AsyncParameterServer, Elastic, ReplicaMismatch, SyncParameterServer

__all__ = [
    "SGD",
    "Action",
    "Adam",
    "AdamW",
    "AllReduce",
    "AsyncParameterServer",
    "CommHook",
    "Disk",
    "Elastic",
    "HalfPrecision",
    "HostMemory",
    "Int8Blocks",
    "Layer",
    "Layout",
    "MemoryTracker",
    "Mesh",
    "MissingGradient",
    "Model",
    "ModelMismatch",
    "Optimizer",
    "OuterMomentum",
    "Placement",
    "PowerSGD",
    "PredictedCall",
    "RankView",
    "Recipe",
    "ReplicaMismatch",
    "Sharding",
    "SyncParameterServer",
    "TrafficMismatch",
    "TrafficMonitor",
    "TrafficTable",
    "Trainer",
    "annotate",
    "checkpoint",
    "choose_group_size",
    "commands",
    "gpt",
    "inference",
    "nn",
    "options",
    "pipeline",
    "plan",
    "raise_on_all_ranks",
    "step_tasks",
    "text",
]
