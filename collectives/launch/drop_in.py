"""Replaces the COMM_WORLD of a program that uses mpi4py, and prints at its end what was sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collectives.mpi4py_compat import Intracomm, Traffic


class DropIn:
    """The drop-in of one rank.

    `is_wanted`: whether COMM_WORLD is replaced.  `is_recorded`: whether what it sends is printed.
    """

    def __init__(self, *, is_wanted: bool, is_recorded: bool) -> None:
        self._is_wanted, self._is_recorded = is_wanted, is_recorded
        self._traffic: Traffic | None = None

    def begin(self) -> None:
        """Replace COMM_WORLD.  Called when mpi4py.MPI is imported, before the program uses it."""
        if self._is_wanted:
            from collectives.mpi4py_compat import replace_world  # noqa: PLC0415 - it imports mpi4py

            replace_world(self._when_replaced)

    def _when_replaced(self, world: Intracomm) -> None:
        from collectives.mpi4py_compat import Traffic  # noqa: PLC0415

        if self._is_recorded:
            self._traffic = Traffic(world)

    def end(self, has_failed: bool = False) -> None:
        """Print what was sent, once, if that is wanted."""
        if self._traffic is not None:
            self._traffic.report(has_failed)
