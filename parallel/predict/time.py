"""A training step in simulated time: the actions of all ranks, on a network.

The ranks with one index along the axis ``pipe`` do the same at the same time, so that each index
has one clock.  A layer takes the time of its operations, and waits for its own messages.  The calls
of the sharding are in progress meanwhile, one after the other along the same axes, and ranks wait
for them where their list does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

import collectives
from collectives.simulation import Machine, Network, simulate_call
from parallel.accounts import PredictedCall
from parallel.layout import BatchSize, Layout, RankView, views_of_parts
from parallel.predict.walk import walk
from parallel.step import Action, LayerAction, Receive, Send, lower

COMPUTING = ("forward", "backward")


class Span(NamedTuple):
    """What ranks do for a time: one of `COMPUTING`, or waiting for an axis."""

    what: str
    begin: float
    end: float


class StepTime(NamedTuple):
    """A simulated training step.

    Attributes
    ----------
    seconds : float
        The time from the beginning to the end of the last rank.
    spans : list of (list of Span)
        What ranks compute and wait for, by their index along ``pipe``.
    """

    seconds: float
    spans: list[list[Span]]

    def exposed(self, index: int) -> dict[str, float]:
        """Return the seconds for which ranks wait, by axis; ``pipe`` includes the bubble."""
        seconds: dict[str, float] = {}
        for what, begin, end in self.spans[index]:
            if what not in COMPUTING:
                seconds[what] = seconds.get(what, 0.0) + end - begin
        return seconds

    def computing(self, index: int) -> float:
        """Return the seconds for which ranks compute."""
        return sum(end - begin for what, begin, end in self.spans[index] if what in COMPUTING)


class Prices:
    """The seconds of calls on a network, each simulated once.

    All groups of a call make it at the same time, and share links.
    """

    def __init__(self, machine: Machine, network: Network) -> None:
        self.machine, self.network = machine, network
        self._known: dict[PredictedCall, float] = {}

    def of(self, call: PredictedCall) -> float:
        """Return the seconds of a call of all its groups."""
        key = replace(call, phase="", axis="", num_calls=1, in_place=False)
        if key not in self._known:
            self._known[key] = self._simulated(key)
        return self._known[key] * call.num_calls

    def _simulated(self, call: PredictedCall) -> float:
        groups = call.groups or (tuple(range(self.network.num_ranks)),)
        size, counts = len(groups[0]), call.counts
        if size == 1:
            return 0.0
        if call.collective == "send":
            choice = collectives.choose("broadcast", "linear", 2, counts * call.itemsize)
        else:
            num_bytes = int(np.sum(counts)) * call.itemsize
            choice = collectives.choose(
                call.collective, call.algorithm, size, num_bytes, itemsize=call.itemsize
            )
        spec = choice.spec(counts, call.itemsize, call.root)
        return simulate_call(spec, self.machine, self.network, groups=groups).seconds

    def together(self, calls: Sequence[PredictedCall]) -> float:
        """Return the seconds of some calls; calls of the same ranks follow each other."""
        ends: dict[int, float] = {}
        for call in calls:
            ranks = [rank for group in call.groups or () for rank in group]
            begin = max((ends.get(rank, 0.0) for rank in ranks), default=0.0)
            ends.update(dict.fromkeys(ranks, begin + self.of(call)))
        return max(ends.values(), default=0.0)


def simulate_step(
    layout: Layout,
    batch: tuple[int, int],
    forward_seconds: Callable[[str], float],
    prices: Prices,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> StepTime:
    """Return one training step in simulated time.

    Parameters
    ----------
    layout : Layout
        The layout of the run; its ranks need not exist.
    batch : tuple of int
        The rows and the context of the batch of all ranks.
    forward_seconds : function
        The seconds of a layer, by its name, forward on a micro-batch.  Each half of backward takes
        as long, and a layer that is computed again once more.
    prices : Prices
        The seconds of calls.
    progress : function
        Called with the number of kinds of calls that are priced, and the number of all kinds.

    Raises
    ------
    ValueError
        If actions wait for each other forever, or if an algorithm cannot serve.
    """
    views: dict[int, list[RankView]] = {}
    for view in views_of_parts(layout):
        views.setdefault(view.pipe_index, []).append(view)
    arrivals: dict[Hashable, float] = {}
    actions = {index: lower(views[index][0]) for index in views}
    costs = CallTimes(BatchSize(*batch), prices)
    costs.prepare(((views[i], action) for i in views for action in actions[i]), progress)
    clocks = {i: PipeClock(views[i], costs, forward_seconds, arrivals) for i in sorted(views)}
    walks = [walk(views[i][0], actions[i], clocks[i]) for i in clocks]
    run_all(walks, arrivals)
    for clock in clocks.values():
        clock.finish()
    return StepTime(
        max(clock.time for clock in clocks.values()), [clock.spans for clock in clocks.values()]
    )


def run_all(walks: list[Iterator[None]], arrivals: dict[Hashable, float]) -> None:
    """Let all walks go on in turns.  Raise ValueError if they wait for each other forever."""
    while walks:
        before = len(walks), len(arrivals)
        walks = [active for active in walks if next(active, "done") != "done"]
        if (len(walks), len(arrivals)) == before:
            raise ValueError("actions wait for each other forever")


class CallTimes:
    """The seconds of the calls of actions, by axis: equal for equal micro-batches."""

    def __init__(self, batch: BatchSize, prices: Prices) -> None:
        self.batch, self.prices = batch, prices
        self._known: dict[tuple[int, Action], list[tuple[str, float]]] = {}

    def prepare(
        self,
        actions: Iterable[tuple[list[RankView], Action]],
        progress: Callable[[int, int], object],
    ) -> None:
        """Price the calls of all `actions`, given with the views of the ranks that do them."""
        distinct = {
            (views[0].pipe_index, action.like(views[0].model)): (views, action)
            for views, action in actions
        }
        for done, (views, action) in enumerate(distinct.values(), 1):
            self.of(views, action)
            progress(done, len(distinct))

    def of(self, views: list[RankView], action: Action) -> list[tuple[str, float]]:
        """Return the axes and the seconds of the calls of an action of ranks with these `views`."""
        key = views[0].pipe_index, action.like(views[0].model)
        if key not in self._known:
            views = views[:1] if isinstance(action, LayerAction) else views  # layers know all ranks
            by_axis: dict[str, list[PredictedCall]] = {}
            for call in joined(action.sends(view, self.batch) for view in views):
                by_axis.setdefault(call.axis, []).append(call)
            self._known[key] = [
                (axis, self.prices.together(calls)) for axis, calls in by_axis.items()
            ]
        return self._known[key]


class PipeClock:
    """The time of the ranks with one index along ``pipe``, and what is in progress."""

    def __init__(
        self,
        views: list[RankView],
        costs: CallTimes,
        forward_seconds: Callable[[str], float],
        arrivals: dict[Hashable, float],
    ) -> None:
        self.views, self.costs, self.forward_seconds = views, costs, forward_seconds
        self.arrivals = arrivals  # of messages, at any index
        self.time = 0.0
        self.spans: list[Span] = []
        self._ends: dict[Hashable, list[tuple[str, float]]] = {}  # axes and times, by name
        self._channels: dict[tuple[str, ...], float] = {}
        self._expected: set[Hashable] = set()  # messages that are being received

    def compute(self, action: Action) -> None:
        """Compute a layer."""
        self._spend(action.phase, action.seconds(self.views[0].model, self.forward_seconds))

    def call(self, action: Action) -> None:
        """Make the calls of an action, and wait for them."""
        for axis, seconds in self.costs.of(self.views, action):
            self._spend(axis, seconds)

    def start(self, action: Action, name: Hashable) -> None:
        """Start calls after the calls in progress along the same axes, or start a message."""
        if isinstance(action, Receive):
            self._expected.add(name)
            return
        seconds = sum(price for _, price in self.costs.of(self.views, action))
        if isinstance(action, Send):
            self.arrivals[action.arrival] = self.time + seconds
            return
        begin = max(self.time, self._channels.get(action.axes, 0.0))
        self._channels[action.axes] = begin + seconds
        self._ends.setdefault(name, []).append((",".join(action.axes), begin + seconds))

    def is_known(self, name: Hashable) -> bool:
        """Return whether it is known when `name` arrives."""
        return name not in self._expected or name in self.arrivals

    def wait(self, name: Hashable) -> None:
        """Wait for a message, or for calls."""
        if name in self._expected:
            self._expected.remove(name)
            self._spend("pipe", self.arrivals[name] - self.time)
        for axis, end in self._ends.pop(name, []):
            self._spend(axis, end - self.time)

    def finish(self) -> None:
        """Wait for all that is in progress."""
        for name in list(self._ends):
            self.wait(name)

    def _spend(self, what: str, seconds: float) -> None:
        if seconds > 0:
            self.spans.append(Span(what, self.time, self.time + seconds))
            self.time += seconds


def joined(parts: Iterable[Iterable[PredictedCall]]) -> Iterator[PredictedCall]:
    """Yield the calls that groups make at the same time as one call of all these groups.

    `parts` has the calls of each part of the model; a group may have ranks of several parts.
    """
    times: dict[PredictedCall, Counter[tuple[int, ...]]] = {}
    for calls in parts:
        of_part: dict[PredictedCall, Counter[tuple[int, ...]]] = {}
        for call in calls:
            groups = of_part.setdefault(replace(call, groups=None), Counter())
            groups.update(call.groups or ())
        for call, number in of_part.items():
            times[call] = times.get(call, Counter()) | number
    for call, counts in times.items():
        for times_each in sorted(set(counts.values())):
            alike = tuple(group for group, count in counts.items() if count == times_each)
            yield replace(call, groups=alike, num_calls=times_each * call.num_calls)
