"""Run by `test_device_table.py` on ranks: the table of devices, on the fake GPU.

Arguments: "right" or "wrong" (every copy to the device is wrong), and those of the command.
"""

from __future__ import annotations

import sys
from typing import Any

from bench import device_table, perf
from tests.fake_device import BACKEND, FakeBackend
from tests.fake_driver import gpu


def spoil_what_comes_from_the_host() -> None:
    """Let the first byte of all that is copied to the device be another one."""
    right = FakeBackend.to_device

    def to_device(self: FakeBackend, pairs: Any) -> None:
        for _, host in pairs:
            host[:1] += 1
        right(self, pairs)

    device_table.through_host = spoiled(device_table.through_host, to_device)


def spoiled(make: Any, to_device: Any) -> Any:
    """A contender that copies wrong bytes back, and no other one does."""

    def made(case: Any, buffers: Any) -> Any:
        found = make(case, buffers)

        def run() -> None:
            right, FakeBackend.to_device = FakeBackend.to_device, to_device
            found.run()
            FakeBackend.to_device = right

        return found._replace(run=run)

    return made


if __name__ == "__main__":
    perf.backend = lambda comm, device: {"cuda": BACKEND}[device]
    device_table.EFFORT = device_table.EFFORT._replace(samples=3, calls=2)
    gpu().reset(queue_length=64)
    if sys.argv[1] == "wrong":
        spoil_what_comes_from_the_host()
    status = device_table.main(sys.argv[2:])
    gpu().check()
    sys.exit(status)
