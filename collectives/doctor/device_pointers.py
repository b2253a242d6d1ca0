"""Whether MPI takes addresses of device memory, and with which command line.

Jobs of two ranks find it out, because an MPI that does not may end the process that passes one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple

from collectives.arrays import num_gpus
from collectives.doctor.exchange import ERROR, MESSAGES, WRONG
from collectives.doctor.findings import Finding, good, wrong
from collectives.launch import TIMED_OUT, find_mpirun, launch

SECONDS = 40.0
"""The time limit of a job."""
PROGRAM = ("-m", "collectives.doctor.exchange")
"""What its ranks run."""
_UCX_PACKAGES = ("libucx-cu13", "libucx-cu12")
# The UCX of Open MPI's wheel has no CUDA, and Open MPI uses UCX by itself only on some networks.
_BY_UCX = "-x LD_LIBRARY_PATH --mca pml ucx --mca pml_ucx_tls any --mca pml_ucx_devices any"


class Way(NamedTuple):
    """A way to start a job: the options of mpirun, and variables of its environment."""

    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}

    def __str__(self) -> str:
        variables = (f"{name}={shlex.quote(value)}" for name, value in self.variables.items())
        return " ".join([*variables, "mpirun", *self.options])


def ways() -> Iterator[Way]:
    """Yield the ways to start a job here: first the plain one."""
    yield Way()
    if find_mpirun().vendor == "openmpi":
        for folder in filter(None, map(ucx_folder, _UCX_PACKAGES)):
            yield Way(tuple(_BY_UCX.split()), {"LD_LIBRARY_PATH": str(folder)})


def ucx_folder(package: str) -> Path | None:
    """Return where a package has its UCX; None if it is not installed."""
    try:
        installed = files(package) or []
    except PackageNotFoundError:
        return None
    return next(
        (Path(file.locate()).parent for file in installed if file.name == "libucp.so.0"), None
    )


def why_refused(way: Way, program: Sequence[str] = PROGRAM, seconds: float = SECONDS) -> str:
    """Return why MPI does not take addresses of device memory in a job; "" if it does."""
    done = launch(
        2, program, mpi_args=way.options, env=way.variables, timeout=seconds, capture=True
    )
    return "" if done.returncode == 0 else why_failed(done.returncode, done.stdout, done.stderr)


def why_failed(status: int, output: str, errors: str) -> str:
    """Return why a job has failed, from what it has written."""
    lines = output.splitlines()
    if said := [line for line in lines if line.startswith((WRONG, ERROR))]:
        return said[0]
    begun = next((line for line in reversed(lines) if line in map(str, MESSAGES)), "")
    when = f" after its ranks had begun to exchange {begun}" if begun else " before any message"
    if status == TIMED_OUT:
        return f"the job did not end in time{when}"
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
    return f"the job ended with status {status}{when}: {last.strip()}"


def device_pointers(program: Sequence[str] = PROGRAM, seconds: float = SECONDS) -> Finding:
    """Return whether MPI takes addresses of device memory.

    MPI is started as this process would start it.
    """
    if why := why_refused(Way(), program, seconds):
        return wrong(f"This MPI does not take addresses of device memory: {why}")
    return good("This MPI takes addresses of device memory.")


def best_way() -> Finding:
    """Return how to start MPI so that it takes addresses of device memory, if there is a GPU."""
    _, why_none = num_gpus()
    if why_none:
        return good(f"{why_none}, so device='direct' was not tried.")
    whys = dict[str, str]()
    for way in ways():
        if not (why := why_refused(way)):
            return good(f"MPI takes addresses of device memory, for device='direct': {way}")
        whys[str(way)] = why
    tried = "; ".join(f"{way}: {why}" for way, why in whys.items())
    return good(
        "MPI does not take addresses of device memory, so device='direct' is refused, and messages "
        f"to other hosts are staged ({tried}). docs/clusters.md says what it needs."
    )
