"""A drop-in in the place of `MPI.COMM_WORLD`, for programs that are not changed."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from functools import wraps
from typing import Any

from mpi4py import MPI

from collectives.mpi4py_compat.intracomm import Intracomm

_ORIGINAL = MPI.COMM_WORLD


def replace_world(then: Callable[[Intracomm], object]) -> None:
    """Let `MPI.COMM_WORLD` be a drop-in, from now on or from the program's own `MPI.Init` on.

    Call it before the program reads that name.  All ranks call it.  `then`: called with the drop-in
    as soon as there is one.  COMM_SELF remains MPI's own, because nothing is sent on it.
    """
    if MPI.Is_initialized():
        _replace(then)
        return
    for name in ("Init", "Init_thread"):
        setattr(MPI, name, _followed(getattr(MPI, name), then))


def _followed(initialize: Callable[..., Any], then: Callable[[Intracomm], object]) -> Any:
    """The function that initializes MPI, and then replaces the world."""

    @wraps(initialize)
    def initialize_and_replace(*args: Any) -> Any:
        answer = initialize(*args)
        _replace(then)
        return answer

    return initialize_and_replace


def _replace(then: Callable[[Intracomm], object]) -> None:
    world = Intracomm(_ORIGINAL)
    world.__module__ = MPI.__name__  # where pickle finds it by its name
    MPI.COMM_WORLD = world  # type: ignore[misc]
    copyreg.pickle(MPI.Intracomm, _reduce)
    then(world)


def _reduce(comm: MPI.Intracomm) -> Any:
    """What is pickled of an intracommunicator of MPI: the original COMM_WORLD has lost its name."""
    return (MPI.Intracomm, (MPI.COMM_WORLD,)) if comm is _ORIGINAL else comm.__reduce__()
