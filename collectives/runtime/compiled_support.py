"""Which parts of a call compiled code can run, and which parts Python runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.arrays import HOST, Arrays, Backend, Operator, kernels
from collectives.engines import Transport
from collectives.programs import CallSpec

_MAX_DIMENSIONS = 8  # of arrays that compiled code can check; `executor.MAX_DIMENSIONS`


def is_fully_compiled(transport: Transport, spec: CallSpec, arrays: Arrays) -> bool:
    """Return whether compiled code can start such a call and run all of it."""
    if not can_start_compiled(transport, arrays):  # then no kernel is loaded
        return False
    return spec.op is None or _has_kernels(spec.op, spec.dtype)


def can_start_compiled(transport: Transport, arrays: Arrays) -> bool:
    """Return whether compiled code can start runs on these arrays."""
    is_seen = all(x is None or x.ndim <= _MAX_DIMENSIONS for x in arrays[1:])
    return arrays.backend is HOST and is_seen and transport.why_interpreted is None


def runs_by(
    transport: Transport, backend: Backend, op: Operator | None, dtype: np.dtype[Any]
) -> str:
    """Return whether compiled code or the interpreter runs a call, and why, as text."""
    if backend is not HOST:
        return f"the interpreter: the arrays are on {backend.name}"
    if transport.why_interpreted is not None:
        return f"the interpreter: {transport.why_interpreted}"
    if op is not None and not _has_kernels(op, dtype):
        return f"compiled code, and Python where it combines {dtype} by {op.name}"
    return "compiled code"


def _has_kernels(op: Operator, dtype: np.dtype[Any]) -> bool:
    """Return whether there are kernels that combine, and divide, arrays of this dtype."""
    if not isinstance(op.function, str) or kernels.combine(op.function, dtype) is None:
        return False
    return not op.is_average or kernels.divide(dtype) is not None
