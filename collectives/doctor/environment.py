"""What can be seen without MPI: its library and launcher, packages, and the machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from collectives.arrays import jit, num_gpus
from collectives.doctor.findings import Finding, good, slow, wrong
from collectives.launch import MpiNotFound, Mpirun, find_mpirun

_SHARED_MEMORY = Path("/dev/shm")
_LITTLE = 256 * 2**20  # bytes of shared memory that a few ranks of an MPI need


def environment() -> Iterator[Finding]:
    """Yield everything that can be seen here, without a job."""
    for look in _LOOKS:
        yield from look()


def _python() -> Iterator[Finding]:
    packages = ", ".join(f"{name} {_version(name)}" for name in ("mpi4py", "numpy", "numba"))
    yield good(f"Python {sys.version.split()[0]}, {packages}.")
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        yield slow(
            "PYTHONDONTWRITEBYTECODE is set, so every rank compiles every module at its start; "
            "unset it."
        )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def _mpi() -> Iterator[Finding]:
    try:
        mpirun = find_mpirun()
    except MpiNotFound as error:
        yield wrong(str(error))
        return
    yield good(f"mpi4py loads {mpirun.vendor}; its launcher is {mpirun.path}.")
    yield from other_launcher(mpirun, shutil.which("mpirun"))


def other_launcher(mpirun: Mpirun, on_path: str | None) -> Iterator[Finding]:
    """Yield whether the command `mpirun` is the launcher of the MPI library that mpi4py loads."""
    if on_path is not None and not os.path.samefile(on_path, mpirun.path):
        yield slow(
            f"The mpirun on PATH is {on_path}, of another installation. It may start ranks that "
            f"are all alone: use {mpirun.path}, or ring launch."
        )


def _numba() -> Iterator[Finding]:
    if (reason := jit.why_unavailable()) is not None:
        yield slow(f"Programs will be interpreted, not compiled: {reason}.")
        return
    yield good("numba compiles programs.")
    folder = Path(jit.__file__).parent
    if not os.access(folder, os.W_OK) and not os.environ.get("NUMBA_CACHE_DIR"):
        yield slow(
            f"Compiled code cannot be kept in {folder}, so every job may compile it anew: set "
            "NUMBA_CACHE_DIR to a folder that all ranks can write."
        )


def _gpu() -> Iterator[Finding]:
    number, why_none = num_gpus()
    if why_none:
        yield good(f"{why_none}: arrays are NumPy's.")
        return
    yield good(
        f"CuPy finds {number} GPU(s). Ranks of a host read each other's arrays, and others stage "
        "them in host memory, so the MPI library need not be GPU-aware."
    )


def _machine() -> Iterator[Finding]:
    yield good(f"This process may use {num_cores()} core(s).")
    if _SHARED_MEMORY.is_dir():
        yield from shared_memory(shutil.disk_usage(_SHARED_MEMORY).free)


def shared_memory(free: int) -> Iterator[Finding]:
    """Yield whether the ranks of a host have enough memory to share."""
    where = f"{free // 2**20} MiB of shared memory are free in {_SHARED_MEMORY}"
    if free >= _LITTLE:
        yield good(f"{where}.")
    else:
        yield slow(
            f"{where}, which is little for several ranks; in Docker, --shm-size=1g gives more."
        )


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_LOOKS: list[Callable[[], Iterator[Finding]]] = [_python, _mpi, _numba, _gpu, _machine]
