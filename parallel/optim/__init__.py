"""Updates: optimizers, the dtypes and the place in which they are made."""

from parallel.optim.offload import Offload
from parallel.optim.optimizers import SGD, Adam, AdamW, Optimizer, pieces
from parallel.optim.precision import DTYPES, LossScale, dtype_of, master_dtype

__all__ = [
    "DTYPES", "SGD", "Adam", "AdamW", "LossScale", "Offload", "Optimizer", "dtype_of",
    "master_dtype", "pieces",
]  # fmt: skip
