"""The kernels of a GPU, compiled when first needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.devices.cuda_source import OPTIONS, combine_source, divide_source
from collectives.devices.interpreter_source import interpreter_source

_LEAST_CAPABILITY = 70  # of a GPU that reads and writes in the order of a system


class CudaKernels:
    """The kernels of the current device, each of which CuPy compiles when it is first needed."""

    def __init__(self) -> None:
        import cupy  # noqa: PLC0415 - only where there is a GPU

        self._cuda = cupy.cuda
        self._functions: dict[tuple[int, str], Any] = {}  # code is unloaded when they go

    def combine(self, function: str, dtype: np.dtype[Any]) -> int | None:
        """Return the address of the kernel for the NumPy function of this name, or None."""
        return self._address("combine", combine_source(function, dtype))

    def divide(self, dtype: np.dtype[Any]) -> int | None:
        """Return the address of the kernel that divides, or None."""
        return self._address("divide", divide_source(dtype))

    def interpret(self, function: str | None, dtype: np.dtype[Any]) -> int | None:
        """Return the address of the kernel that runs device programs, or None."""
        if int(self._cuda.Device().compute_capability) < _LEAST_CAPABILITY:
            return None
        return self._address("interpret", interpreter_source(function, dtype))

    def _address(self, name: str, code: str | None) -> int | None:
        if code is None:
            return None
        key = self._cuda.Device().id, code
        if key not in self._functions:  # of two threads, the first decides which one stays
            self._functions.setdefault(key, self._compiled(name, code))
        return int(self._functions[key].ptr)

    def _compiled(self, name: str, code: str) -> Any:
        """Return the function, loaded on the current device.

        `cupy.RawModule` would flush subnormal numbers to zero: it adds an option that says so.
        """
        compile_it = self._cuda.compiler.compile_using_nvrtc
        binary, _ = compile_it(code, options=OPTIONS, cache_in_memory=True)
        module = self._cuda.Module()
        module.load(binary)
        return module.get_function(name)
