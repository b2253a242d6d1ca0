"""Updates: optimizers, the dtypes and the place in which they are made."""

from parallel.optim.offload import DiskOffload, HostOffload, NoOffload, Offload
from parallel.optim.optimizers import SGD, Adam, AdamW, Optimizer, pieces, zeros_like
from parallel.optim.precision import DTYPES, LossScale, dtype_of, master_dtype

__all__ = [
    "DTYPES", "SGD", "Adam", "AdamW", "DiskOffload", "HostOffload", "LossScale", "NoOffload",
    "Offload", "Optimizer", "dtype_of", "master_dtype", "pieces", "zeros_like",
]  # fmt: skip
