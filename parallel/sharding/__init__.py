"""How ranks divide the memory of data parallelism, and the collectives that sum and gather it."""

from parallel.sharding.collective import (
    AllGather,
    AllReduce,
    CommHook,
    Completion,
    Gather,
    ReduceScatter,
)
from parallel.sharding.hooks import GeneratorHook, HalfPrecision, Int8Blocks, OuterMomentum
from parallel.sharding.power_sgd import PowerSGD
from parallel.sharding.quantization import QuantizedExchange, QuantizedGather
from parallel.sharding.server import BroadcastFromServer, PushToServer, ReduceToServer
from parallel.sharding.sharding import Sharding, choose_group_size

__all__ = [
    "AllGather", "AllReduce", "BroadcastFromServer", "CommHook", "Completion", "Gather",
    "GeneratorHook", "HalfPrecision", "Int8Blocks", "OuterMomentum", "PowerSGD", "PushToServer",
    "QuantizedExchange", "QuantizedGather", "ReduceScatter", "ReduceToServer", "Sharding",
    "choose_group_size",
]  # fmt: skip
