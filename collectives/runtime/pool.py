"""The kinds of calls of a communicator, found by what a caller passes, or by what a call does."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from collectives.algorithms import registry
from collectives.programs import Program
from collectives.runtime.kind import Kind, Make

_MAX_KINDS = 512
_MAX_BYTES = 32 * 2**20  # of one idle prepared call of each kind
_MAX_SEEN = 4096

# A bound method of `Repeat`, which Python calls faster than an object.
MakeAtOnce = Callable[[Any, Any, "float | None"], Any]


class Pool:
    """A bounded number of kinds; if there are too many, all are forgotten.

    A key of a call is a tuple: the request, which is the collective with all arguments except the
    arrays; whether a plan is wanted; and the shape and dtype of the arrays.

    Attributes
    ----------
    latest, latest_plans : dict
        What makes the latest call, and the latest plan, of each request at once.
    is_open : bool
        Whether calls may be made at once; not after a failure, and not while a call that has
        reached its time limit is not done.
    """

    def __init__(self) -> None:
        self.latest: dict[Hashable, MakeAtOnce] = {}
        self.latest_plans: dict[Hashable, MakeAtOnce] = {}
        self._repeats: dict[Hashable, MakeAtOnce] = {}
        self._kinds: dict[Hashable, Kind] = {}
        self._num_bytes = 0
        self._seen: set[int] = set()
        self.is_open = True
        registry.watch(self)

    def __len__(self) -> int:
        return len(self._repeats)

    def set_open(self, is_open: bool) -> None:
        """Let calls be made at once, or not."""
        self.is_open = is_open
        if not is_open:
            self._forget_latest()

    def find(self, key: tuple[Any, ...]) -> MakeAtOnce | None:
        """Return what makes the call of this key at once, or None; it becomes the latest."""
        repeat = self._repeats.get(key) if self.is_open else None
        if repeat is not None:
            self._note_latest(key, repeat)
        return repeat

    def add(self, key: tuple[Any, ...], repeat: MakeAtOnce) -> None:
        """Let `find` return `repeat` for calls of this key."""
        if len(self._repeats) >= _MAX_KINDS:
            self.forget()
        self._repeats[key] = repeat
        self._note_latest(key, repeat)

    def _note_latest(self, key: tuple[Any, ...], repeat: MakeAtOnce) -> None:
        request, is_plan, *_ = key
        (self.latest_plans if is_plan else self.latest)[request] = repeat

    def kind(self, what: Hashable, make: Make, program: Program) -> Kind:
        """Return the kind of calls that do `what`, which is made if there is none."""
        kind = self._kinds.get(what)
        if kind is None:
            kind = Kind(make, program)
            if len(self._kinds) >= _MAX_KINDS or self._num_bytes + kind.num_bytes > _MAX_BYTES:
                self.forget()
            self._kinds[what] = kind
            self._num_bytes += kind.num_bytes
        return kind

    def is_repeated(self, key: tuple[Any, ...]) -> bool:
        """Return whether this was asked for the same key before, as far as it is remembered.

        Calls with counts that may never come again are kept the second time.
        """
        number = hash(key)
        if number in self._seen:
            return True
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen.add(number)
        return False

    def forget(self) -> None:
        """Forget all kinds, for example when an algorithm is registered again.

        Calls in progress and plans go on.
        """
        self._repeats.clear()
        self._forget_latest()
        self._kinds.clear()
        self._num_bytes = 0

    def _forget_latest(self) -> None:
        self.latest.clear()
        self.latest_plans.clear()
