"""The dtypes a model computes in, and the loss scale that keeps float16 in range."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

SMALLEST = 2.0**-14  # the least loss scale: with less, no gradient would be a normal float16
DTYPES = ("float64", "float32", "bfloat16", "float16")


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of this name.  Raise ValueError if no model computes in it."""
    if name not in DTYPES:
        raise ValueError(f"a model computes in {', '.join(DTYPES)}, not in {name!r}")
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def master_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of updates: float32 for two-byte dtypes, which lose small steps."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


class LossScale:
    """The factor, `value`, of the loss before backward: small gradients are not zero in float16.

    An overflow halves the factor, and the update is skipped; `interval` updates without an overflow
    double it.  In other dtypes it stays 1.  Micikevicius et al. 2018.
    """

    def __init__(
        self, dtype: np.dtype[Any], *, initial: float = 2.0**16, interval: int = 2000
    ) -> None:
        self.is_dynamic = dtype == np.float16
        self.value = initial if self.is_dynamic else 1.0
        self.interval, self.num_good = interval, 0

    def update(self, *, is_finite: bool) -> bool:
        """Set the next step's scale; return whether this step's gradients are to be used.

        Raises FloatingPointError if they are not finite and the scale cannot become smaller.
        """
        if not self.is_dynamic:
            return True
        if not is_finite:
            if self.value <= SMALLEST:
                raise FloatingPointError(
                    f"gradients are not finite, even with the loss scaled by {self.value:g}"
                )
            self.value, self.num_good = self.value / 2, 0
            return False
        self.num_good += 1
        if self.num_good == self.interval:
            self.value, self.num_good = self.value * 2, 0
        return True
