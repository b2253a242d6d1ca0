"""What a training run will send, call by call, before it sends anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import collectives

Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

POINT_TO_POINT = ("send", "send_recv")
UNCOUNTED = (*POINT_TO_POINT, "check")  # calls without a number on all ranks
UNPREDICTED = ("envelope",)  # of messages between GPUs, if ranks read each other's memory
CHECK_BYTES, CHECK_ALGORITHM = 16, "bruck"  # of the digests that checked mode exchanges
REDUCTIONS = ("reduce", "all_reduce", "reduce_scatter")


class Tally(NamedTuple):
    """Numbers of calls (None where they cannot be counted), messages and bytes."""

    calls: int | None = 0
    messages: int = 0
    bytes: int = 0

    def plus(self, other: Tally) -> Tally:
        """Return the sum of two tallies."""
        calls = None if self.calls is None or other.calls is None else self.calls + other.calls
        return Tally(calls, self.messages + other.messages, self.bytes + other.bytes)

    def __str__(self) -> str:
        calls = "" if self.calls is None else f"{self.calls} calls, "
        return f"{calls}{self.messages} messages, {self.bytes} bytes"


@dataclass(frozen=True)
class PredictedCall:
    """Equal calls of one collective that a training run will make.

    Attributes
    ----------
    phase, axis : str
        The label of the phase, and the name of the communicator.
    collective, algorithm, counts, itemsize, root, in_place
        As in `collectives.predict`; or ``"send"`` and the like, whose calls are one message each.
    num_calls : int
        How many calls each group makes.
    groups : tuple of tuple of int, optional
        The ranks of each group that makes these calls; for ``"send"`` (source, destination).
        By default all ranks are one group.

    Examples
    --------
    >>> from parallel import PredictedCall
    >>> PredictedCall("loss", "all_reduce", "recursive_doubling", 2, 8, num_calls=3).sent(4)
    Tally(calls=3, messages=24, bytes=384)
    """

    phase: str
    collective: str
    algorithm: str
    counts: Any
    itemsize: int = 1
    num_calls: int = 1
    groups: tuple[tuple[int, ...], ...] | None = None
    axis: str = ""
    root: int = 0
    in_place: bool = False

    def matrices(self, size: int) -> Int64:
        """Return the messages and bytes from each of `size` ranks to each, int64 (2, size, size).

        Raises ValueError if the algorithm does not serve the number of ranks.
        """
        totals = np.zeros((2, size, size), np.int64)
        for group in self.groups or (tuple(range(size)),):
            if self.collective in POINT_TO_POINT:
                totals[:, group[0], group[1]] += 1, self.itemsize * self.counts
            elif len(group) > 1:
                sent = self._of_group(len(group))
                totals[np.ix_((0, 1), group, group)] += np.stack([sent.messages, sent.bytes])
        return totals * self.num_calls

    def scratch(self, rank: int) -> int | None:
        """Return the bytes of scratch memory of `rank` in a call; None if `rank` makes no call."""
        for group in self.groups or ():
            if rank in group:
                is_alone = len(group) == 1
                return 0 if is_alone else self._of_group(len(group)).scratch[group.index(rank)]
        return None

    def _of_group(self, size: int) -> Any:
        return collectives.predict(
            "all_gather" if self.collective == "check" else self.collective,
            size,
            self.counts,
            itemsize=self.itemsize,
            algorithm=self.algorithm,
            root=self.root,
            in_place=self.in_place,
        )

    def sent(self, size: int) -> Tally:
        """Return what all `size` ranks together send in all of these calls; see `matrices`.

        A call without messages (of one rank) is not counted.  The number of calls of a "send" or a
        "check" is None.
        """
        return self.tally(self.matrices(size))

    def tally(self, matrices: Int64) -> Tally:
        """Return the result of `sent`, from the `matrices` of this object."""
        messages, nbytes = matrices.sum(axis=(1, 2)).tolist()
        num_groups = 1 if self.groups is None else len(self.groups)
        calls = self.num_calls * num_groups if messages else 0
        return Tally(None if self.collective in UNCOUNTED else calls, messages, nbytes)

    def check(self, mode: bool | str, size: int) -> list[PredictedCall]:
        """Return what checked `mode` (`Communicator.check`) sends in a job with `size` ranks."""
        if not mode or self.collective in POINT_TO_POINT:
            return []
        ranks = size if self.groups is None else len(self.groups[0])
        times = 2 if mode == "finite" and self.collective in REDUCTIONS else 1
        return [
            replace(
                self,
                collective="check",
                algorithm=CHECK_ALGORITHM,
                counts=(CHECK_BYTES,) * ranks,
                itemsize=1,
                num_calls=times * self.num_calls,
                root=0,
                in_place=False,
            )
        ]


def merged(calls: Iterable[PredictedCall]) -> list[PredictedCall]:
    """Return the calls, with equal calls added up, in the order in which they first appear."""
    times: Counter[PredictedCall] = Counter()
    for call in calls:
        times[replace(call, num_calls=1)] += call.num_calls
    return [replace(call, num_calls=n) for call, n in times.items() if n]
