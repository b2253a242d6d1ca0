"""A drop-in in the place of `MPI.COMM_WORLD`, for programs that are not changed."""

from __future__ import annotations

import copyreg
from typing import Any

from mpi4py import MPI

from collectives.mpi4py_compat.intracomm import Intracomm

_ORIGINAL = MPI.COMM_WORLD


def replace_world() -> Intracomm:
    """Let `MPI.COMM_WORLD` be a drop-in, and return it.

    All ranks call it, before the program reads that name.  COMM_SELF remains MPI's own, because
    nothing is sent on it.
    """
    world = Intracomm(_ORIGINAL)
    world.__module__ = MPI.__name__  # where pickle finds it by its name
    MPI.COMM_WORLD = world  # type: ignore[misc]
    copyreg.pickle(MPI.Intracomm, _reduce)
    return world


def _reduce(comm: MPI.Intracomm) -> Any:
    """Return what is pickled of an intracommunicator of MPI.

    The original COMM_WORLD has lost its name to the drop-in, which is pickled in its place.
    """
    return (MPI.Intracomm, (MPI.COMM_WORLD,)) if comm is _ORIGINAL else comm.__reduce__()
