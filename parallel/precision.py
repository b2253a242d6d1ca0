"""What numbers a model computes with, and how float16 is kept from running out of range."""

from __future__ import annotations

from typing import Any

import numpy as np

SMALLEST = 2.0**-14  # scales of a loss: with less, no gradient would be a normal float16
DTYPES = ("float64", "float32", "bfloat16", "float16")


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of this name.  ValueError for one that no model computes with."""
    if name not in DTYPES:
        raise ValueError(f"a model computes in {', '.join(DTYPES)}, not in {name!r}")
    if name == "bfloat16":
        import ml_dtypes  # noqa: PLC0415 - only who computes in bfloat16 needs it

        name = ml_dtypes.bfloat16
    return np.dtype(name)


def master_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What updates are computed in: lr x gradient would be lost in two bytes."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


class LossScale:
    """By what the loss is multiplied before backward, so that small gradients survive in float16.

    It is halved, and the update skipped, when a gradient overflows, and doubled after `interval`
    updates without; where halving could help no more FloatingPointError is raised.  Micikevicius et
    al. 2018.  Other dtypes have range enough: the scale stays 1.
    """

    def __init__(
        self, dtype: np.dtype[Any], *, initial: float = 2.0**16, interval: int = 2000
    ) -> None:
        self.is_dynamic = dtype == np.float16
        self.value = initial if self.is_dynamic else 1.0
        self.interval, self.num_good = interval, 0

    def update(self, *, is_finite: bool) -> bool:
        """After a backward pass: whether its gradients are to be used."""
        if not self.is_dynamic:
            return True
        if not is_finite:
            if self.value <= SMALLEST:
                raise FloatingPointError(
                    f"gradients are not finite with the loss scaled by {self.value:g} either"
                )
            self.value, self.num_good = self.value / 2, 0
            return False
        self.num_good += 1
        if self.num_good == self.interval:
            self.value, self.num_good = self.value * 2, 0
        return True
