"""Run under mpirun by `test_path.py`: through how many functions a call goes to its first message.

Prints, as rank 0, the functions, files and frames of a first call and of one that came before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import collectives

EXECUTOR = "collectives.engines.executor"  # the compiled code, which posts the messages
PACKAGE = str(Path(collectives.__file__).parent)


class Followed:
    """The functions of the library that are entered before compiled code is."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.frames = 0
        self.has_posted = False

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if event == "c_call" and getattr(called, "__module__", None) == EXECUTOR:
            self.has_posted = True  # what follows only waits
        if event != "call" or self.has_posted or not code.co_filename.startswith(PACKAGE):
            return
        if not code.co_name.startswith("<"):  # a comprehension is part of its function
            self.functions.add((code.co_filename, code.co_qualname))
        self.frames = max(self.frames, depth(frame))


def depth(frame: FrameType | None) -> int:
    """The frames of the library under way."""
    found = 0
    while frame is not None:
        found += frame.f_code.co_filename.startswith(PACKAGE)
        frame = frame.f_back
    return found


def followed(call: Callable[[], object], comm: collectives.Communicator) -> dict[str, int]:
    path = Followed()
    sys.setprofile(path)
    call()
    sys.setprofile(None)
    assert path.has_posted
    files = {file for file, _ in path.functions}
    return {"functions": len(path.functions), "files": len(files), "frames": path.frames}


if __name__ == "__main__":
    comm = collectives.world()
    x, out = np.ones(8), np.empty(8)
    comm.all_reduce(x.astype(np.float32))  # compiled code, kernels and tables are there
    comm.all_reduce(x, out=out)
    longer, its_out = np.ones(9), np.empty(9)
    # Nothing has been called with an operator: no call that is kept is tried.
    first = followed(lambda: comm.all_reduce(longer, op="sum", out=its_out), comm)
    comm.all_reduce(x, out=out)
    again = followed(lambda: comm.all_reduce(x, out=out), comm)
    if comm.rank == 0:
        print(json.dumps({"first": first, "again": again}))
