"""The bytes that a rank keeps while it does one action after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache

from parallel.accounts import PredictedCall
from parallel.layout import BatchSize, RankView
from parallel.nn import Activations, ArraySpec


class Kept:
    """The bytes that a rank keeps at a moment of a step, and the most so far.

    Parameters
    ----------
    view : RankView
    rows, context : int
        The shape of the rank's part of a batch.
    whole : BatchSize, optional
        The batch of all ranks, if a layer needs to know its rows.
    is_offloaded : bool
        Whether activations are elsewhere between forward and backward.

    Attributes
    ----------
    now, peak : Counter of str
        The bytes kept at this moment and the most so far, by category.
    activations : list of (dict of str to Activations)
        What each layer keeps, by micro-batch.
    reducing : list of str
        The units and buckets whose sums are in progress.
    """

    def __init__(
        self,
        view: RankView,
        rows: int,
        context: int,
        whole: BatchSize | None = None,
        *,
        is_offloaded: bool = False,
    ) -> None:
        self.view, self.is_offloaded = view, is_offloaded
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._tokens = tokens_of(view, rows, context, whole)
        self.activations = activations_of(view, self._tokens)
        self.reducing: list[str] = []
        self._held: dict[tuple[str, ...], int] = {}
        self._pending: list[Iterator[int]] = []  # the scratch of the calls that follow each other
        self._gathers: dict[str, Iterator[int]] = {}

    def change(self, category: str, nbytes: int) -> None:
        """Keep `nbytes` more, or fewer, in a `category`."""
        self.now[category] += nbytes
        self.peak[category] = max(self.peak[category], self.now[category])

    def hold(self, nbytes: int, category: str, *what: str) -> None:
        """Keep `nbytes` in a `category` until `what` is freed."""
        self._held[category, *what] = nbytes
        self.change(category, nbytes)

    def free(self, category: str, *what: str) -> None:
        """Free the bytes that are held for `what`, if any."""
        self.now[category] -= self._held.pop((category, *what), 0)

    def free_all(self, category: str, what: str) -> None:
        """Free all that was held under names that begin with `what`."""
        for key in [key for key in self._held if key[:2] == (category, what)]:
            self.free(*key)

    def holds(self, category: str, *what: str) -> bool:
        """Return whether something is held."""
        return (category, *what) in self._held

    def message_bytes(self, layer: str, micro_batch: int) -> int:
        """Return the bytes of what enters a `layer`."""
        return self.view.layout.inputs_of(self._tokens[micro_batch])[layer].nbytes

    # The scratch memory of calls

    def run(self, calls: Iterable[PredictedCall], *name: str) -> None:
        """Make calls one after the other, and wait for each."""
        for _ in self._each(calls, name):
            pass

    def start(self, calls: Iterable[PredictedCall], *name: str) -> None:
        """Start the first of some calls, which `complete` completes."""
        self._pending.append(self._begun(calls, name))

    def start_gather(self, calls: Iterable[PredictedCall], unit: str) -> None:
        """Start the calls that gather a unit."""
        self._gathers[unit] = self._begun(calls, ("gather", unit))

    def complete_gather(self, unit: str) -> None:
        """Complete the calls that gather a unit, if there are any, and free what was received."""
        next(self._gathers.pop(unit, iter(())), None)
        self.free("buffers", "arriving", unit)

    def complete(self) -> None:
        """Complete the calls that were started, in turns."""
        while self._pending:
            calls = self._pending.pop(0)
            if next(calls, None) is not None:
                self._pending.append(calls)

    def _begun(self, calls: Iterable[PredictedCall], name: tuple[str, ...]) -> Iterator[int]:
        """Start the first call; each item that is taken of the result starts the next one."""
        scratch = self._each(calls, name)
        next(scratch, None)
        return scratch

    def _each(self, calls: Iterable[PredictedCall], name: tuple[str, ...]) -> Iterator[int]:
        """Hold the scratch memory of one call after the other."""
        for call in calls:
            if (nbytes := call.scratch(self.view.rank)) is not None:
                self.hold(nbytes, "scratch", *name)
                yield nbytes
                self.free("scratch", *name)


def tokens_of(
    view: RankView, rows: int, context: int, whole: BatchSize | None = None
) -> list[ArraySpec]:
    """Return the rank's tokens of each micro-batch.

    `rows` are the rows of this rank, and `context` is the length of a whole row.  `whole` is as in
    `Kept`.
    """
    layout, numbers = view.layout, range(view.recipe.num_micro_batches)
    return [layout.tokens_of(rows, context, k, view.rank, whole=whole) for k in numbers]


def activations_of(view: RankView, tokens: Iterable[ArraySpec]) -> list[dict[str, Activations]]:
    """Return what each layer keeps, by micro-batch, for the result of `tokens_of`."""
    kept_for = cache(view.model.activation_bytes)  # most micro-batches are equal
    return [kept_for(x) for x in tokens]
