"""Replace the COMM_WORLD of a program that uses mpi4py, and print at its end what was sent."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from collectives.diagnostics import unseen
from collectives.launch import bootstrap

if TYPE_CHECKING:
    from collectives.mpi4py_compat import Traffic

_NO_TABLE = "No table of what was sent: rank 0 has not used MPI by mpi4py."


class DropIn:
    """The drop-in of one rank.

    Parameters
    ----------
    is_wanted : bool
        Whether COMM_WORLD is replaced.
    is_recorded : bool
        Whether what it sends is printed.
    """

    def __init__(self, *, is_wanted: bool, is_recorded: bool) -> None:
        self._is_wanted, self._is_recorded = is_wanted, is_recorded
        self._traffic: Traffic | None = None

    def begin(self, mpi: ModuleType) -> None:
        """Replace COMM_WORLD now, or when the program has initialized MPI.

        It is called when `mpi`, the module mpi4py.MPI, is imported, before the program uses it.
        """
        if not self._is_wanted:
            return
        if mpi.Is_initialized():
            self._replace()
            return
        for name in ("Init", "Init_thread"):
            setattr(mpi, name, _followed(getattr(mpi, name), self._replace))

    def _replace(self) -> None:
        from collectives.mpi4py_compat import Traffic, replace_world  # noqa: PLC0415 - it needs MPI

        world = replace_world()
        if self._is_recorded:
            self._traffic = Traffic(world)

    def end(self, has_failed: bool = False) -> None:
        """Print what was sent, once, if that is wanted."""
        if self._traffic is not None:
            self._traffic.report(has_failed)
        elif self._is_recorded and bootstrap.number() == 0:
            self._is_recorded = False
            sys.stdout.writelines(f"{line}\n" for line in (_NO_TABLE, *unseen()))


def _followed(initialize: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
    """Return a function that does the same, and then something else."""

    @wraps(initialize)
    def initialize_and_go_on(*args: Any) -> Any:
        answer = initialize(*args)
        then()
        return answer

    return initialize_and_go_on
