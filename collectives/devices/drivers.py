"""Finds the driver of the device that holds an array."""

from __future__ import annotations

from collectives.arrays import Backend
from collectives.devices.driver import Driver, addresses_in_libcuda

_known: dict[str, Driver] = {}  # by the names of backends


def driver_of(backend: Backend) -> Driver:
    """Return the driver of a backend's device.

    Raises LookupError, which says why there is none.
    """
    if backend.name not in _known:
        _known[backend.name] = _new(backend)
    return _known[backend.name]


def _new(backend: Backend) -> Driver:
    if backend.kind != "cupy":
        driver = getattr(backend, "driver", None)
        if driver is None:
            raise LookupError(f"arrays of kind {backend.kind} have no driver")
        return driver  # type: ignore[no-any-return]
    from collectives.devices.kernels import CudaKernels  # noqa: PLC0415 - it imports CuPy

    try:
        return Driver(addresses_in_libcuda(), CudaKernels())
    except (OSError, AttributeError) as error:
        raise LookupError(f"the GPU's driver cannot be called: {error}") from error
