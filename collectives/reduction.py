"""The operators of reductions: what combines two arrays, and for which dtypes that makes sense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_INTEGERS, _FLOATS, _COMPLEX, _BOOL = "iu", "f", "c", "b"


@dataclass(frozen=True)
class Operator:
    """A named operator.  `ufunc` combines two operands; an average is divided at the end.

    All of these are commutative.  Combinations are rounded to the array's dtype each time, also for
    float16 and bfloat16.
    """

    name: str
    ufunc: str
    kinds: str
    is_average: bool = False
    is_commutative: bool = True

    def check(self, dtype: np.dtype[Any]) -> None:
        """Raise TypeError if the operator has no meaning for this dtype."""
        if _kind(dtype) not in self.kinds:
            hint = ""
            if _kind(dtype) == _BOOL:
                hint = "; bool takes and, or, xor, min, max"
            raise TypeError(f"op {self.name!r} is not defined for dtype {dtype}{hint}")


def _kind(dtype: np.dtype[Any]) -> str:
    """NumPy's kind letter; bfloat16 counts as a float, no other foreign dtype as anything."""
    is_native = dtype.type.__module__ == "numpy"
    return _FLOATS if is_bfloat16(dtype) else dtype.kind if is_native else "?"


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Whether this is ml_dtypes' bfloat16, asked without importing ml_dtypes."""
    is_foreign = dtype.itemsize == 2 and dtype.type.__module__.startswith("ml_dtypes")
    return is_foreign and dtype.name == "bfloat16"


_NUMBERS = _INTEGERS + _FLOATS + _COMPLEX
OPERATORS = {
    op.name: op
    for op in (
        Operator("sum", "add", _NUMBERS),
        Operator("prod", "multiply", _NUMBERS),
        Operator("min", "minimum", _BOOL + _INTEGERS + _FLOATS),
        Operator("max", "maximum", _BOOL + _INTEGERS + _FLOATS),
        Operator("avg", "add", _FLOATS + _COMPLEX, is_average=True),
        Operator("and", "bitwise_and", _BOOL + _INTEGERS),
        Operator("or", "bitwise_or", _BOOL + _INTEGERS),
        Operator("xor", "bitwise_xor", _BOOL + _INTEGERS),
    )
}


def operator(name: str) -> Operator:
    """The operator of this name.  Raises ValueError for an unknown one."""
    if not isinstance(name, str) or name not in OPERATORS:
        raise ValueError(f"unknown op {name!r}; known: {', '.join(OPERATORS)}")
    return OPERATORS[name]
