"""The state of the compiled loop that enqueues a device program."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from collectives.arrays import jit
from collectives.devices.driver import MEMORY_OPERATION_WORDS, Driver, DriverError
from collectives.devices.table import ROW_WORDS, Words
from collectives.engines import Operands


@cache
def compiled() -> Callable[[int], int]:
    """The compiled loop, which is compiled or loaded at first use."""
    from collectives.devices import enqueue  # noqa: PLC0415 - it imports numba

    return jit.function(enqueue.enqueue.py_func, "int64(int64)")


class Loop:
    """The words of the compiled loop; see `enqueue`."""

    def __init__(self, driver: Driver, operands: Operands, itemsize: int) -> None:
        from collectives.devices import enqueue  # noqa: PLC0415 - it imports numba

        self.names = enqueue
        self.rows = np.zeros((0, ROW_WORDS), np.int64)
        self._values = np.zeros(12, np.int64)
        self._parameters = self._values.ctypes.data + 8 * np.arange(12)
        self._batch = np.zeros((enqueue.MOST_IN_BATCH, MEMORY_OPERATION_WORDS), np.int64)
        self.words = np.zeros(enqueue.NUM_STATE_WORDS, np.int64)
        self._address = self.words.ctypes.data
        dtype, kernels = operands.output.dtype, driver.kernels
        function = operands.function if isinstance(operands.function, str) else ""
        is_average = operands.divisor > 1
        self._driver, addresses = driver, driver.addresses
        for name, value in {
            enqueue.BATCH: self._batch.ctypes.data,
            enqueue.VALUES: self._values.ctypes.data,
            enqueue.PARAMETERS: self._parameters.ctypes.data,
            enqueue.COMBINE: (kernels.combine(function, dtype) or 0) if function else 0,
            enqueue.DIVIDE: (kernels.divide(dtype) or 0) if is_average else 0,
            enqueue.DIVISOR: operands.divisor,
            enqueue.ITEMSIZE: itemsize,
            enqueue.BATCH_OPERATION: addresses["cuStreamBatchMemOp_v2"],
            enqueue.COPY_BYTES: addresses["cuMemcpyDtoDAsync_v2"],
            enqueue.LAUNCH: addresses["cuLaunchKernel"],
        }.items():
            self.words[name] = value

    def begin(self, rows: Words, stream: int) -> None:
        """Set the rows of the next run."""
        self.rows, names = rows, self.names
        self.words[names.STREAM], self.words[names.TABLE] = stream, rows.ctypes.data
        self.words[names.NUM_ROWS], self.words[names.ROW] = len(rows), 0
        self.words[names.NUM_OUTSTANDING] = 0
        self.words[names.MOST_OUTSTANDING] = self._driver.most_outstanding

    def nothing_outstanding(self) -> None:
        """Note that the device has done all that was enqueued."""
        self.words[self.names.NUM_OUTSTANDING] = 0

    def advance(self) -> int:
        """Enqueue what can be enqueued; return the answer of the loop."""
        answer = int(compiled()(self._address))
        if answer == self.names.DRIVER_ERROR:
            raise DriverError("enqueueing", int(self.words[self.names.ERROR]))
        return answer

    @property
    def row(self) -> int:
        """The row that is enqueued next."""
        return int(self.words[self.names.ROW])

    @row.setter
    def row(self, row: int) -> None:
        self.words[self.names.ROW] = row
