"""The pool of prepared calls: calls that are alike use the same ones, one after the other.

A prepared call belongs to its kind while it is idle, to a `Work` while it runs, or to a `Plan`
until that is freed; then its kind has it again.  A kind keeps no arrays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from collectives.algorithms import registry
from collectives.arrays import Arrays
from collectives.engines import Reusable
from collectives.programs import Program
from collectives.runtime.prepared import Prepared

_MAX_KINDS = 512
_MAX_BYTES = 32 * 2**20  # of one idle prepared call of each kind
_MAX_SEEN = 4096

# A bound method of `Repeat`, which Python calls faster than an object.
MakeAtOnce = Callable[[Any, Any, "float | None"], Any]
Key = tuple[Any, ...]
"""What a caller passes: see `Pool`."""
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
            if not prepared.can_be_reusable:  # it is older than compiled code
                return
            prepared.let_code_start_like(self.like)
        prepared.execution.detach()
        self.idle.append(prepared)

    def let_code_start(self, like: Reusable) -> None:
        """Let compiled code start all idle ones as it may start the execution `like`."""
        self.idle.clear()  # compiled code cannot start these
        self.like = like


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

    def find(self, key: Key) -> MakeAtOnce | None:
        """Return what makes the call of this key at once, or None; it becomes the latest."""
        repeat = self._repeats.get(key) if self.is_open else None
        if repeat is not None:
            request, is_plan, *_ = key
            (self.latest_plans if is_plan else self.latest)[request] = repeat
        return repeat

    def add(self, key: Key, repeat: MakeAtOnce) -> None:
        """Let `find` return `repeat` for calls of this key."""
        if len(self._repeats) >= _MAX_KINDS:
            self.forget()
        self._repeats[key] = repeat
        self.find(key)

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

    def is_repeated(self, key: Key) -> bool:
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
