"""Memory of the driver ends with its object, and with the process if Python exits before that."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
import sys
from collectives.devices.shadow import Allocation

class Driver:
    def allocate(self, num_bytes):
        return num_bytes

    def try_call(self, name, address, write=os.write):
        write(1, f"{name} {address}\\n".encode())

class Control:
    def __del__(self, write=os.write):
        write(1, b"is seen when Python exits\\n")

sys.left, sys.control = {Allocation(Driver(), 8)}, {Control()}
ends = Allocation(Driver(), 16)
del ends
os.write(1, b"exits\\n")
"""


def test_what_is_left_when_python_exits_is_not_freed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    said = ["cuMemFree_v2 16", "exits", "is seen when Python exits"]
    assert done.stdout.splitlines() == said, done.stderr
