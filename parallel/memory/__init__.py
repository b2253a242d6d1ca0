"""Memory of a rank: tracked from the arrays that are alive, and predicted by formulas.

The two are equal, to the byte, in each category.  For a model that is too large to allocate

    python -m parallel.memory --params 7.5e9 --ranks 64

prints what each strategy would keep on a rank.
"""

from parallel.memory.formulas import offloaded_bytes, shard_size, state_bytes
from parallel.memory.tracker import CATEGORIES, MemoryTracker, arrays_in, owner_of

__all__ = [
    "CATEGORIES", "MemoryTracker", "arrays_in", "offloaded_bytes", "owner_of", "shard_size",
    "state_bytes",
]  # fmt: skip
