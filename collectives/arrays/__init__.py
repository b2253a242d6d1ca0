"""Arrays: their kinds and memory, the operators that combine them, and checks of arguments.

Only this folder distinguishes NumPy from CuPy.
"""

from collectives.arrays.allocator import LARGE, Bytes, empty
from collectives.arrays.backends import (
    HOST,
    Array,
    Arrays,
    Backend,
    BinaryFunction,
    Event,
    Stream,
    backend_of_kind,
    is_device_array,
    num_elements,
)
from collectives.arrays.gpus import num_gpus, use_gpu
from collectives.arrays.jit import compiled
from collectives.arrays.kernels import is_bfloat16
from collectives.arrays.operators import OPERATORS, Operator, has_infinities, operator

__all__ = [
    "HOST",
    "LARGE",
    "OPERATORS",
    "Array",
    "Arrays",
    "Backend",
    "BinaryFunction",
    "Bytes",
    "Event",
    "Operator",
    "Stream",
    "backend_of_kind",
    "compiled",
    "empty",
    "has_infinities",
    "is_bfloat16",
    "is_device_array",
    "num_elements",
    "num_gpus",
    "operator",
    "use_gpu",
]
