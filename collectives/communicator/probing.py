"""Whether the MPI of a job takes addresses of device memory, which another job finds out.

An MPI that does not may end the process that passes one.  So, before a communicator with
`device="direct"` is used, the first rank of each host starts a job of two ranks there, under the
same MPI with the same settings, and all ranks agree on the outcome.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from operator import itemgetter

import numpy as np

from collectives.communicator.communicator import Communicator
from collectives.errors import CollectiveError, on_all_ranks
from collectives.runtime import all_gather_integers

COMMAND = [sys.executable, "-m", "collectives.doctor", "--device-pointers"]
"""Starts the job, and says in a line that begins with WRONG why it has failed."""
KNOWN = "COLLECTIVES_DEVICE_POINTERS"
"""The variable that is 1 if such a job is known to be right, so that none is started."""

_SECONDS = 60.0  # for the command, which has a shorter time limit itself
_TEXT_BYTES = 400
# What tells a process that it belongs to a job, and what the user sets all the same.
_OF_JOBS = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "HYDRA_", "MPI_LOCAL", "SLURM_")
_OF_USERS = ("OMPI_MCA_", "OMPI_ALLOW_", "PRTE_MCA_", "PRTE_ALLOW_", "PMIX_MCA_")
_has_succeeded: list[bool] = []  # in this process


def refuse_unless_probed(comm: Communicator, timeout: float | None) -> None:
    """Raise CollectiveError on all ranks unless the job was right on all hosts.

    All ranks call it.  `timeout` is that of the call that makes `comm`, which is freed after a
    failure.
    """
    is_first = comm.topology.mates(comm.rank)[0] == comm.rank
    is_known = bool(_has_succeeded) or os.environ.get(KNOWN) == "1"
    try:
        agree(comm, why_it_fails(timeout) if is_first and not is_known else "")
    except CollectiveError as error:
        if error.is_on_all_ranks:
            comm.free()
        raise
    _has_succeeded[:] = [True]


def agree(comm: Communicator, why: str) -> None:
    """Raise CollectiveError on all ranks if the job of any has failed.

    `why` says why the job of this rank has failed; it is empty if the job has not.
    """
    text = np.frombuffer(why.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), np.int64)
    texts = all_gather_integers(comm._session, text.tolist(), "device probe")
    whys = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in texts]
    if any(whys):
        failed = filter(itemgetter(1), enumerate(whys))
        where = "; ".join(f"on the host of rank {rank}: {text}" for rank, text in failed)
        error = CollectiveError(
            "device='direct' was asked for, but it is not certain that MPI takes addresses of "
            f"device memory ({where}). ring doctor says how to start it"
        )
        raise on_all_ranks(error)


def why_it_fails(timeout: float | None) -> str:
    """Run the job, and return why it has failed; "" if it has not."""
    limit = _SECONDS if timeout is None else min(_SECONDS, timeout / 2)
    try:
        done = subprocess.run(
            COMMAND,
            env=outside_of_job(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"a job of two ranks did not end within {limit:g} s"
    except OSError as error:
        return f"a job of two ranks cannot be started: {error}"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith("WRONG")]
    lines = lines or [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].removeprefix("WRONG").strip() if lines else f"status {done.returncode}"


def outside_of_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a process starts its own job, with the user's settings."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_OF_JOBS) or name.startswith(_OF_USERS)
    }
