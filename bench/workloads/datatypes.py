"""Names on the command line: of datatypes, in NCCL and in NumPy, and of collectives."""

from __future__ import annotations

import argparse
from typing import Any

import ml_dtypes
import numpy as np

from collectives import algorithms

ALL = "all"
# As nccl-tests prints them.  Its "float" is float32; NumPy's is not.
NCCL: dict[str, np.dtype[Any]] = {
    "int8": np.dtype("int8"),
    "uint8": np.dtype("uint8"),
    "int32": np.dtype("int32"),
    "uint32": np.dtype("uint32"),
    "int64": np.dtype("int64"),
    "uint64": np.dtype("uint64"),
    "half": np.dtype("float16"),
    "float": np.dtype("float32"),
    "double": np.dtype("float64"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def dtype_of(name: str) -> np.dtype[Any]:
    """Return a dtype of numbers, by its name in NCCL or in NumPy; an argument type."""
    if name in NCCL:
        return NCCL[name]
    try:
        dtype = np.dtype(name)
    except TypeError:
        raise argparse.ArgumentTypeError(f"there is no dtype {name!r}") from None
    if dtype.kind not in "biufc":
        raise argparse.ArgumentTypeError(f"{name} is not a dtype of numbers")
    return dtype


def dtypes_of(name: str) -> list[np.dtype[Any]]:
    """Return one dtype, or "all" of NCCL's that the library has; an argument type."""
    return list(NCCL.values()) if name == ALL else [dtype_of(name)]


def collectives_of(name: str) -> list[str]:
    """Return the collective of this name, or all."""
    return algorithms.collectives() if name == ALL else [name]
