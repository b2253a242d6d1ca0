"""Holds streams until a word in host memory becomes 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from collectives import Communicator
from collectives.devices.driver import WAIT_VALUE, Driver
from tests.fakes.driver import gpu


@contextmanager
def released(driver: Driver | None = None) -> Iterator[np.ndarray]:
    """A word for which streams can wait; at the end they are released.

    `driver`: None: that of the fake GPU.
    """
    driver = driver or gpu().driver
    word = np.zeros(1024, np.uint32)  # no other word is in its page
    driver.call("cuMemHostRegister_v2", word.ctypes.data, word.nbytes, 3)
    try:
        yield word[:1]
    finally:
        word[:] = 1
        driver.call("cuMemHostUnregister", word.ctypes.data)  # waits for all streams


def hold(stream: Any, word: np.ndarray, driver: Driver | None = None) -> None:
    """Let what comes next on a stream wait until the word is 1."""
    operation = np.array([WAIT_VALUE, word.ctypes.data, 1, 0, 0, 0], np.int64)
    arguments = int(stream.ptr), 1, operation.ctypes.data, 0
    (driver or gpu().driver).call("cuStreamBatchMemOp_v2", *arguments)


def hold_each(comm: Communicator, stream: Any, word: np.ndarray) -> None:
    """Hold a stream of each rank, when the devices of all ranks have done everything."""
    comm.synchronize()
    comm.barrier()
    hold(stream, word)
