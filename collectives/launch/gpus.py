"""Give each rank of a host GPUs of its own, of those that CUDA_VISIBLE_DEVICES leaves the job.

It runs before the program, because CUDA reads this variable when it starts.
"""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
from itertools import takewhile

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")  # of Open MPI; of Hydra
_COUNT = """
import ctypes
driver, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert not driver.cuInit(0) and not driver.cuDeviceGetCount(ctypes.byref(number))
print(number.value)
"""
_OPTION = "--gpus-per-rank="  # with a number, the first word of a rank's command


class NoGpus(RuntimeError):  # noqa: N818 - as MpiNotFound
    """A rank cannot have GPUs of its own; the message says why."""


def options(gpus_per_rank: int | None) -> list[str]:
    """Return what comes before the command of a rank.

    Raises ValueError for less than 1 GPU.
    """
    if gpus_per_rank is None:
        return []
    if operator.index(gpus_per_rank) < 1:
        raise ValueError(f"gpus_per_rank is {gpus_per_rank}; it must be at least 1")
    return [f"{_OPTION}{gpus_per_rank}"]


def read_options(command: list[str]) -> tuple[int | None, list[str]]:
    """Return the `gpus_per_rank` that `options` wrote, and the rest of the command."""
    if not command[0].startswith(_OPTION):
        return None, command
    return int(command[0].removeprefix(_OPTION)), command[1:]


def bind(gpus_per_rank: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Leave this rank its own GPUs.

    Raises NoGpus if there are too few.
    """
    own = gpus_of(_local_rank(environment), gpus_per_rank, _visible(environment))
    environment[_VISIBLE] = ",".join(own)


def gpus_of(local_rank: int, gpus_per_rank: int, visible: Sequence[str]) -> Sequence[str]:
    """Return the GPUs of a rank: those after the GPUs of the ranks of its host before it."""
    start = local_rank * gpus_per_rank
    own = visible[start : start + gpus_per_rank]
    if len(own) < gpus_per_rank:
        raise NoGpus(
            f"--gpus-per-rank {gpus_per_rank}: {_VISIBLE} leaves {len(visible)} GPU(s) on this "
            f"host, too few for {local_rank + 1} ranks. Without the option, ranks can share GPUs "
            "(comm.use_gpu)."
        )
    return own


def _local_rank(environment: MutableMapping[str, str]) -> int:
    for name in _LOCAL_RANKS:
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    raise NoGpus(f"--gpus-per-rank: this mpirun sets none of {', '.join(_LOCAL_RANKS)}")


def _visible(environment: MutableMapping[str, str]) -> list[str]:
    """Return the numbers or UUIDs of the GPUs that CUDA would find."""
    if _VISIBLE not in environment:
        return [str(number) for number in range(_num_gpus())]
    words = (word.strip() for word in environment[_VISIBLE].split(","))
    return list(takewhile(_is_gpu, words))  # CUDA ignores what follows an invalid word


def _is_gpu(word: str) -> bool:
    return word.isdecimal() or word.startswith(("GPU-", "MIG-"))


def _num_gpus() -> int:
    """Return the number of GPUs of this host.

    Another process counts them: here CUDA would read the variable.
    """
    command = [sys.executable, "-I", "-S", "-c", _COUNT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0
