"""Run by `test_rivals.py` on ranks: the microbenchmark on the fake GPU, beside other libraries.

Arguments: a folder for the JSON files, and the faults of NCCL that are tried one after the other.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.__main__ import main
from bench.calls import mpi_on_device
from bench.commands import world as commands_world
from bench.contenders import mpi, nccl
from bench.contenders.contender import WORKS
from bench.timing import copy_rate, deadline
from tests.bench.contenders import fake_nccl
from tests.bench.contenders.fake_nccl import FakeNccl, with_communicator
from tests.fakes.device import BACKEND, FakeDeviceArray
from tests.fakes.driver import gpu

LIBRARIES: dict[str, Callable[[], FakeNccl]] = {
    "right": FakeNccl,
    "old": lambda: FakeNccl(version=22999),
    "wrong": lambda: with_communicator(fake_nccl.Wrong),
    "hanging": lambda: with_communicator(fake_nccl.Hanging),
    "failing on one": lambda: with_communicator(fake_nccl.FailingOnOne),
    "endless": lambda: with_communicator(fake_nccl.Endless),
    "not connecting": fake_nccl.NotConnecting,
    "connecting without one": fake_nccl.ConnectingWithoutOne,
}
FEW = ["-n", "1", "-w", "1", "-m", "2", "--call", "--native", "--device", "cuda"]


def measure(path: Path, *words: str) -> int:
    return main([*words, *FEW, "-J", str(path)])


def let_mpi_see_arrays() -> None:
    """As an MPI would that takes arrays of the fake GPU."""
    described = mpi.described

    def seen(case: Any, x: Any, counts: Any) -> Any:
        return described(case, x.memory if isinstance(x, FakeDeviceArray) else x, counts)

    mpi.described = seen


if __name__ == "__main__":
    commands_world.backend = lambda comm, device: {"cuda": BACKEND}[device]
    copy_rate.NUM_BYTES, deadline.SECONDS, deadline.END_SECONDS = 1 << 16, 2.0, 1.0
    os.environ[nccl.SWITCH] = "1"
    gpu().reset(queue_length=64)
    folder, faults = Path(sys.argv[1]), sys.argv[2:]
    for fault in faults:
        sys.modules["cupy.cuda.nccl"] = LIBRARIES[fault]()  # type: ignore[assignment]
        status = measure(folder / f"{fault}.json", "all_reduce", "--sizes", "1K", "64K")
        assert status == (fault == "wrong"), (fault, status)
    if "right" in faults:
        trial = ["all", "--sizes", "4K", "--device", "cuda"]
        with contextlib.suppress(TypeError):
            assert mpi_on_device.COMMAND.main(trial), "MPI took arrays that it cannot see"
        let_mpi_see_arrays()
        assert mpi_on_device.COMMAND.main(trial) == 0
        sys.modules["cupy.cuda.nccl"] = FakeNccl()  # type: ignore[assignment]
        measured = "broadcast", "reduce", "scatter", "gather", "reduce_scatter", "all_gather"
        chosen = ["--collectives", *measured, "all_to_all", "scan"]
        words = ["all", *chosen, "--sizes", "64K", f"--device-mpi={WORKS}"]
        assert measure(folder / "all.json", *words) == 0
    gpu().check()
