"""What layers may know of the training step that they are a part of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parallel.nn.functional import Array, namespace_of, on_host
from parallel.nn.layer.cache import KeyValues
from parallel.nn.layer.specs import BatchRows


def nothing(*_: object) -> None:
    """Do nothing: a default for functions that layers call."""


@dataclass
class Step:
    """What layers may know of the training step that they are a part of.

    Attributes
    ----------
    targets : array
        The right classes of this micro-batch, int64 (rows, context).
    total : int
        The number of targets in the batch of all ranks.
    positions : array, optional
        The positions of this rank's tokens in a row, int64 (context,), in host memory.  Without
        them positions count from 0 on.
    context : int
        The number of tokens in a whole row, which ranks may divide.
    loss_scale : float
        The factor of the loss.
    track : function
        Called with arrays that backward computes again.
    num_recomputed : int
        The number of forward passes of layers that have run again.
    is_again : bool
        Whether this is a forward pass that runs again.  Such a pass adds no losses and counts
        nothing.
    losses : list of float
        What layers add to the loss.
    is_reference : bool
        Whether layers complete every call where they start it.
    add_wait : function
        Called with the seconds that a layer waited for a call.
    tokens : array
        The input of the model, int64 (rows, ...).
    batch : BatchRows, optional
        Which rows of which batch this micro-batch consists of.
    numbers : array, optional
        The numbers of the tokens in the batch, int64, in an expert that gets some of the tokens.
    pass_turn : function
        Lets another micro-batch compute until that one waits itself.
    cache : KeyValues, optional
        The keys and values of attention, if these tokens follow others of the same rows.
    copied : mapping of int to array
        Arrays in host memory, by the ``id`` of their copies on a device (`on_host`).
    """

    targets: Array = None
    total: int = 1
    positions: np.ndarray[Any, np.dtype[np.int64]] | None = None
    context: int = 0
    loss_scale: float = 1.0
    track: Callable[[Any], object] = nothing
    num_recomputed: int = 0
    is_again: bool = False
    losses: list[float] = field(default_factory=list)
    is_reference: bool = False
    add_wait: Callable[[float], object] = nothing
    tokens: Array = None
    batch: BatchRows | None = None
    numbers: Array = None
    pass_turn: Callable[[], object] = nothing
    cache: KeyValues | None = None
    copied: Mapping[int, np.ndarray[Any, Any]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """The number of tokens in a row of this micro-batch, also the tokens of other ranks."""
        return int((self.tokens if self.targets is None else self.targets).shape[-1])

    def position_index(self, x: Array) -> Any:
        """Return the index of the positions of the tokens `x` (rows, length), on their device."""
        if self.positions is None:
            return slice(x.shape[1])
        return namespace_of(x).asarray(self.positions)

    def on_host(self, x: Array) -> np.ndarray[Any, Any]:
        """Return `x`, the tokens or targets, in host memory, without waiting for a device.

        An array on a device that is not in `copied` is waited for.
        """
        host = self.copied.get(id(x))
        return on_host(x) if host is None else host

    @contextmanager
    def numbered(self, numbers: Array) -> Iterator[None]:
        """Let layers in this context compute tokens with these `numbers`."""
        before, self.numbers = self.numbers, numbers
        try:
            yield
        finally:
            self.numbers = before

    def wait(self, finish: Callable[[], Array]) -> Array:
        """Return the result of `finish`, which waits for a call of a layer that sends only once.

        Meanwhile this rank may compute another micro-batch.  Therefore all ranks that have a
        communicator in common must call `wait` equally often.
        """
        self.pass_turn()
        return self._wait(finish)

    def _wait(self, finish: Callable[[], Array]) -> Array:
        began = time.perf_counter()
        result = finish()
        self.add_wait(time.perf_counter() - began)
        return result

    def overlap(self, finish: Callable[[], Array], compute: Callable[[], object]) -> Array:
        """Call `compute`, and then `finish`, which waits for a call; return the result of `finish`.

        A reference step calls `finish` first.
        """
        if self.is_reference:
            result = self._wait(finish)
            compute()
            return result
        compute()
        return self._wait(finish)


def token_numbers(
    step: Step, rank: int, part: slice | None = None
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the numbers of the tokens of a `rank` in the batch of all ranks, (rows, tokens).

    `part` says which tokens of each row the rank has, if ranks that compute the same rows divide
    the tokens.
    """
    assert step.batch is not None
    rows = np.array(step.batch.of_rank[rank], np.int64)
    positions = np.arange(step.length) if step.positions is None else np.asarray(step.positions)
    mine = positions if part is None else positions[part]
    numbers: np.ndarray[Any, np.dtype[np.int64]] = rows[:, None] * (step.context or step.length)
    return numbers + mine
