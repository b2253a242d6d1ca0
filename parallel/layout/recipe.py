"""How to train, independent of how ranks divide the work."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from array_api_compat import numpy as numpy_namespace

from parallel.optim import Adam, Optimizer, Storage, dtype_of
from parallel.text import Tokens

BatchFunction: TypeAlias = Callable[[int, int, int], tuple[Tokens, Tokens]]
"""Called with (step, rank, number of ranks); returns this rank's inputs and targets of the step."""

ProgressCallback: TypeAlias = Callable[[int, float], object]
"""Called with the number of steps done and the last loss."""


@dataclass(frozen=True)
class Recipe:
    """How to train, independent of how ranks divide the work.

    Attributes
    ----------
    dtype : str
        The dtype in which the model computes, keeps and sends: ``"float64"``, ``"float32"``,
        ``"bfloat16"`` or ``"float16"``.  In two-byte dtypes updates are made in float32.
    optimizer : function
        Called with the values to update by name, and ``make_state``; returns an `Optimizer`.
    num_micro_batches : int
        The number of parts in which a rank computes its rows of a batch, at least 1.  Their
        gradients are added.
    clip : float, optional
        The largest norm of the gradient of the whole model, more than 0; a larger gradient is
        scaled to it.
    seed : int
        The seed of the initial values.
    xp : namespace
        The array namespace of the parameters: ``array_api_compat.numpy`` or
        ``array_api_compat.cupy``.
    offload, offload_activations : function
        Makes the storage in which updates are made, and the storage of activations between forward
        and backward: `HostMemory`, or ``partial(Disk, folder)``; by default the model's memory.
    reduce_dtype : str, optional
        The dtype in which gradients are sent and summed; by default `dtype`.

    Raises
    ------
    ValueError
        If an option is out of range.

    Examples
    --------
    >>> from functools import partial
    >>> from parallel import SGD, Recipe
    >>> recipe = Recipe(dtype="float16", optimizer=partial(SGD, lr=0.1), clip=1.0)
    """

    dtype: str = "float64"
    optimizer: Callable[..., Optimizer] = Adam
    num_micro_batches: int = 1
    clip: float | None = None
    seed: int = 0
    xp: Any = numpy_namespace
    offload: Callable[[int, Any], Storage] = Storage
    offload_activations: Callable[[int, Any], Storage] = Storage
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1:
            k = self.num_micro_batches
            raise ValueError(f"num_micro_batches is {k}: it must be at least 1")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"clip is {self.clip}: it must be a finite norm above 0, or None")
        if self.reduce_dtype is not None:
            dtype_of(self.reduce_dtype)
