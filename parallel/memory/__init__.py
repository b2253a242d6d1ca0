"""What a rank keeps in memory: counted from the arrays that are alive, and predicted by formula.

The two are equal, by category and to the byte.  For a model that nobody has in memory

    python -m parallel.memory --params 7.5e9 --ranks 64

prints what each strategy would keep.
"""

from parallel.memory.counted import CATEGORIES, Memory, arrays_in, owner_of
from parallel.memory.formulas import (
    activations,
    num_own,
    offloaded,
    predicted,
    predicted_there,
    share,
    states,
)

__all__ = [
    "CATEGORIES", "Memory", "activations", "arrays_in", "num_own", "offloaded", "owner_of",
    "predicted", "predicted_there", "share", "states",
]  # fmt: skip
