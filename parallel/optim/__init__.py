"""Updates: optimizers, and the dtypes and the storage in which they are made.

Formulas say what a rank keeps, and what an update moves between memories.
"""

from parallel.optim.formulas import bytes_moved, offloaded_bytes, state_bytes
from parallel.optim.offload import Offload
from parallel.optim.optimizers import SGD, Adam, AdamW, Optimizer, pieces
from parallel.optim.precision import DTYPES, LossScale, dtype_of, master_dtype
from parallel.optim.storage import DEVICE_COLUMNS, OFFLOADED, Disk, HostMemory, Storage

__all__ = [
    "DEVICE_COLUMNS",
    "DTYPES",
    "OFFLOADED",
    "SGD",
    "Adam",
    "AdamW",
    "Disk",
    "HostMemory",
    "LossScale",
    "Offload",
    "Optimizer",
    "Storage",
    "bytes_moved",
    "dtype_of",
    "master_dtype",
    "offloaded_bytes",
    "pieces",
    "state_bytes",
]
