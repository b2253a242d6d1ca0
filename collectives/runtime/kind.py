"""Kinds: calls that are alike use the same prepared calls, one after the other.

A prepared call belongs to its kind while it is idle, to a `Work` while it runs, or to a `Plan`
until that is freed; then its kind has it again.  A kind keeps no arrays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from collectives.arrays import Arrays
from collectives.engines import Reusable
from collectives.programs import Program
from collectives.runtime.prepared import Prepared

Make = Callable[[Arrays, int, int], Prepared]
"""Prepares a call on some arrays, with a tag and a number."""

_MAX_IDLE, _MAX_IDLE_BYTES = 32, 2**20  # of prepared calls of a kind
_BYTES_OF_STATE = 8192  # of an execution, besides its program and its scratch


class Kind:
    """Calls that are alike, and their prepared calls that do not run.

    Parameters
    ----------
    make : callable
        Prepares one more call.
    program : Program
        The program of the calls, which says how much memory an idle one needs.

    Attributes
    ----------
    idle : deque
        The prepared calls that do not run.
    like : Reusable or None
        An execution like which compiled code may start all idle ones; None: it starts none.
    """

    like: Reusable | None = None

    def __init__(self, make: Make, program: Program) -> None:
        self.make = make
        self.num_bytes = program.rows.nbytes + program.num_scratch + _BYTES_OF_STATE
        most_idle = max(1, min(_MAX_IDLE, _MAX_IDLE_BYTES // self.num_bytes))
        self.idle = deque[Prepared](maxlen=most_idle)

    def take(self, arrays: Arrays, tag: int, number: int) -> Prepared:
        """Return a prepared call on these arrays, which comes back when its run is complete."""
        try:
            prepared = self.idle.pop()
        except IndexError:  # there is none, or another thread has taken the last one
            prepared = self.make(arrays, tag, number)
        else:
            prepared.attach(arrays, tag)
            prepared.renumber(number)
        prepared.give = self.give
        return prepared

    def give(self, prepared: Prepared) -> None:
        """Take a prepared call back."""
        if self.like is not None and not prepared.is_reusable:
            if not prepared.can_be_reusable:
                return
            prepared.let_code_start_like(self.like)
        prepared.execution.detach()
        self.idle.append(prepared)

    def let_code_start(self, like: Reusable) -> None:
        """Let compiled code start all idle ones as it may start the execution `like`."""
        self.idle.clear()  # compiled code cannot start these
        self.like = like
