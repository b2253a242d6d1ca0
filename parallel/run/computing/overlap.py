"""Measure how much of the communication of a step is hidden behind its computation."""

from __future__ import annotations

from statistics import median

PERIOD = 10  # one of so many steps runs without overlap, as the reference


class Overlap:
    """The seconds that this rank waited for communication, step by step.

    In one of `PERIOD` steps every call is completed where it is started, so that nothing is
    hidden; in the others a rank waits only for what its computation has not hidden.  What is sent
    and computed is the same.  Waiting for a slower rank counts in both kinds of steps.

    Attributes
    ----------
    is_reference : bool
        Whether the current step runs without overlap.
    num_steps : int
        How many steps have begun.
    """

    def __init__(self) -> None:
        self.is_reference = False
        self.num_steps = 0
        self._seconds: dict[bool, list[float]] = {True: [], False: [0.0]}  # 0.0: before any step

    def begin(self) -> None:
        """Begin a step.  The second step is the first reference: the first step makes programs."""
        self.is_reference = self.num_steps % PERIOD == 1
        self.num_steps += 1
        self._seconds[self.is_reference].append(0.0)

    def add(self, seconds: float) -> None:
        """Add time for which this rank waited."""
        self._seconds[self.is_reference][-1] += seconds

    def seconds(self) -> tuple[float, float] | None:
        """Return the median seconds a step without and with overlap; None before three steps."""
        alone, exposed = self._seconds[True], self._seconds[False][2:]
        return (median(alone), median(exposed)) if alone and exposed else None

    def summary(self) -> str:
        """Return a sentence with the share that was hidden; "" before three steps."""
        if (seconds := self.seconds()) is None or not seconds[0]:
            return ""
        alone, exposed = seconds
        return (
            f"communication {alone * 1e3:.2f} ms a step, of which {exposed * 1e3:.2f} ms were not"
            f" hidden by computation: {max(0.0, 1 - exposed / alone):.0%} hidden"
        )
