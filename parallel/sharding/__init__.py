"""How ranks divide the memory of data parallelism, and the hooks that sum and gather it.

`Sharding` is the value; a hook says for any rank what it sends, and does it with arrays.
"""

from parallel.sharding.collective import (
    AllGather,
    AllReduce,
    Arrays,
    Axes,
    CommHook,
    Completion,
    Gather,
    ReduceScatter,
    rounded_bytes,
)
from parallel.sharding.hooks import GeneratorHook, HalfPrecision, Int8Blocks, OuterMomentum
from parallel.sharding.power_sgd import PowerSGD
from parallel.sharding.quantization import (
    QuantizedExchange,
    QuantizedGather,
    dequantize,
    quantize,
    quantized_bytes,
)
from parallel.sharding.server import SERVER, BroadcastFromServer, PushToServer, ReduceToServer
from parallel.sharding.sharding import Sharding, choose_group_size

__all__ = [
    "SERVER",
    "AllGather",
    "AllReduce",
    "Arrays",
    "Axes",
    "BroadcastFromServer",
    "CommHook",
    "Completion",
    "Gather",
    "GeneratorHook",
    "HalfPrecision",
    "Int8Blocks",
    "OuterMomentum",
    "PowerSGD",
    "PushToServer",
    "QuantizedExchange",
    "QuantizedGather",
    "ReduceScatter",
    "ReduceToServer",
    "Sharding",
    "choose_group_size",
    "dequantize",
    "quantize",
    "quantized_bytes",
    "rounded_bytes",
]
