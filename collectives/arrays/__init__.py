"""Arrays: their kinds and memory, the operators that combine them, and checks of arguments.

Only this folder distinguishes NumPy from CuPy.
"""

from collectives.arrays.backends import (
    HOST,
    Array,
    Arrays,
    Backend,
    BinaryFunction,
    Bytes,
    backend_of_kind,
    num_elements,
)
from collectives.arrays.jit import compiled
from collectives.arrays.kernels import is_bfloat16
from collectives.arrays.operators import OPERATORS, Operator, has_infinities, operator
from collectives.arrays.scratch import ScratchPool

__all__ = [
    "HOST",
    "OPERATORS",
    "Array",
    "Arrays",
    "Backend",
    "BinaryFunction",
    "Bytes",
    "Operator",
    "ScratchPool",
    "backend_of_kind",
    "compiled",
    "has_infinities",
    "is_bfloat16",
    "num_elements",
    "operator",
]
