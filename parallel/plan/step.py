"""A training step in simulated time: the lists of actions of all ranks, on a network.

The ranks of one place along the axis ``pipe`` do the same at the same time, so each place has one
clock.  Computation takes what the operations of a layer take.  A layer waits for what it sends.
What the sharding gathers and sums is in progress meanwhile, one call after the other along the same
axes, and a place waits for it where its list does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

import collectives
from collectives.simulation import Machine, Network, simulate_call
from parallel.accounts import PredictedCall
from parallel.actions import Action
from parallel.lowering import SENDS
from parallel.nn.layer import Recompute
from parallel.runtime import Trainer
from parallel.runtime.prediction import calls_of, model_parts
from parallel.runtime.state import BatchSize, State

Key = tuple[str, int, int | None]  # the direction, stage and micro-batch of a message

COMPUTED = ("F", "B", "I", "W")
STARTED = ("UNSHARD", "REDUCE", "AVERAGE")


class Span(NamedTuple):
    """What a place does for a time: ``"forward"``, ``"backward"``, or waiting for an axis."""

    what: str
    begin: float
    end: float


class Step(NamedTuple):
    """A simulated training step.

    Attributes
    ----------
    seconds : float
        From its begin to the end of the last place.
    spans : list of (list of Span)
        By place along ``pipe``: what it computes, and what it waits for.
    """

    seconds: float
    spans: list[list[Span]]

    def exposed(self, place: int) -> dict[str, float]:
        """Return the seconds for which a place waits, by axis; for ``pipe`` with the bubble."""
        found: dict[str, float] = {}
        for what, begin, end in self.spans[place]:
            if what not in ("forward", "backward"):
                found[what] = found.get(what, 0.0) + end - begin
        return found

    def computing(self, place: int) -> float:
        """Return the seconds for which a place computes."""
        kinds = ("forward", "backward")
        return sum(end - begin for what, begin, end in self.spans[place] if what in kinds)


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


@dataclass
class _Place:
    """Where a place stands: its clock, and when what is in progress will have ended."""

    parts: list[State]  # of its ranks
    clock: float = 0.0
    next: int = 0
    channels: dict[tuple[str, ...], float] = field(default_factory=dict)
    gathers: dict[str, tuple[str, float]] = field(default_factory=dict)
    sums: list[tuple[str, float]] = field(default_factory=list)
    expected: set[Key] = field(default_factory=set)
    spans: list[Span] = field(default_factory=list)

    @property
    def actions(self) -> list[Action]:
        """The list of its ranks."""
        return self.parts[0].actions

    def spend(self, what: str, seconds: float) -> None:
        """Let time pass."""
        if seconds > 0:
            self.spans.append(Span(what, self.clock, self.clock + seconds))
            self.clock += seconds

    def wait_until(self, what: str, time: float) -> None:
        """Let time pass until something has ended."""
        self.spend(what, time - self.clock)


def simulate_step(
    trainer: Trainer,
    batch: tuple[int, int],
    forward_seconds: Callable[[str], float],
    prices: Prices,
) -> Step:
    """Return one training step in simulated time.

    Parameters
    ----------
    trainer : Trainer
        The run, also one on ranks that do not exist (`PlannedTrainer`).
    batch : tuple of int
        The rows and the context of the batch of all ranks.
    forward_seconds : function
        The seconds of a layer, by its name, forward on a micro-batch.  Each half of backward takes
        as long, and a layer that is computed again once more.
    prices : Prices
        What calls take.

    Raises
    ------
    ValueError
        If actions wait for each other forever, or if an algorithm cannot serve.
    """
    return _Simulation(trainer, BatchSize(*batch), forward_seconds, prices).run()


class _Simulation:
    def __init__(
        self,
        trainer: Trainer,
        batch: BatchSize,
        forward_seconds: Callable[[str], float],
        prices: Prices,
    ) -> None:
        self.trainer, self.batch, self.prices = trainer, batch, prices
        self.forward_seconds = forward_seconds
        by_place: dict[int, list[State]] = {}
        for part in model_parts(trainer):
            by_place.setdefault(part.pipe_place, []).append(part)
        self.places = [_Place(by_place[place]) for place in sorted(by_place)]
        self.arrivals: dict[Key, float] = {}
        self.known: dict[tuple[object, ...], list[tuple[str, float]]] = {}

    def run(self) -> Step:
        while sum(self.proceed(place) for place in self.places):
            pass
        if any(place.next < len(place.actions) for place in self.places):
            raise ValueError("actions wait for each other forever")
        for place in self.places:
            self.finish(place)
        return Step(max(place.clock for place in self.places), [p.spans for p in self.places])

    def proceed(self, place: _Place) -> int:
        """Do the actions of a place up to one that waits for a message; return their number."""
        before = place.next
        while place.next < len(place.actions) and self.do(place, place.actions[place.next]):
            place.next += 1
        return place.next - before

    def do(self, place: _Place, action: Action) -> bool:
        """Do an action; return False if its message has not been sent yet."""
        if action.kind in COMPUTED:
            return self.compute(place, action)
        if action.kind.startswith("RECV"):
            place.expected.add((action.kind[-1], action.stage, action.micro_batch))
        elif action.kind.startswith("SEND"):
            direction, step = action.kind[-1], 1 if action.kind[-1] == "F" else -1
            seconds = sum(price for _, price in self.priced(place, action))
            key = direction, action.stage + step, action.micro_batch
            self.arrivals[key] = place.clock + seconds
        elif action.kind in STARTED:
            self.start(place, action)
        elif action.kind == "WAIT" and action.part != SENDS:
            self.finish(place)
        elif action.kind != "RESHARD":
            for axis, seconds in self.priced(place, action):
                place.spend(axis, seconds)
        return True

    def compute(self, place: _Place, action: Action) -> bool:
        """Compute a layer: wait for its input and its parameters, and then for what it sends."""
        direction = "F" if action.kind == "F" else "B"
        key = direction, action.stage, action.micro_batch
        if key in place.expected and action.kind != "W":
            if key not in self.arrivals:
                return False
            place.expected.remove(key)
            place.wait_until("pipe", self.arrivals[key])
        model = place.parts[0].model
        for unit in model.units_of(action.part):
            if unit in place.gathers:
                place.wait_until(*place.gathers.pop(unit))
        times = {"B": 2, "I": 1, "F": 1, "W": 1}[action.kind]
        is_again = action.kind in ("B", "I") and isinstance(model.layers[action.part], Recompute)
        seconds = (times + is_again) * self.forward_seconds(action.part)
        place.spend("forward" if action.kind == "F" else "backward", seconds)
        for axis, price in self.priced(place, action):
            place.spend(axis, price)
        return True

    def start(self, place: _Place, action: Action) -> None:
        """Start to gather a unit or to sum a bucket, after what is in progress on these axes."""
        begin = max(place.clock, place.channels.get(action.axes, 0.0))
        end = begin + sum(price for _, price in self.priced(place, action))
        place.channels[action.axes] = end
        if action.kind == "UNSHARD":
            place.gathers[action.part] = ",".join(action.axes), end
        else:
            place.sums.append((",".join(action.axes), end))

    def finish(self, place: _Place) -> None:
        """Wait for all sums, and at the end of the list for all that is gathered."""
        is_end = place.next >= len(place.actions)
        for axis, end in [*place.sums, *(place.gathers.values() if is_end else ())]:
            place.wait_until(axis, end)
        place.sums.clear()

    def priced(self, place: _Place, action: Action) -> list[tuple[str, float]]:
        """Return the axes and the seconds of the calls of an action; equal for micro-batches."""
        is_message = action.kind.startswith("SEND")
        is_of_layer = action.kind in COMPUTED
        needs_rows = is_of_layer and self.trainer.model.layers[action.part].needs_rows
        key = (
            place.parts[0].pipe_place, action.kind, action.part, action.axes, action.phase,
            action.stage if is_message else None, action.micro_batch if needs_rows else None,
        )  # fmt: skip
        if key not in self.known:
            parts = place.parts[:1] if is_of_layer else place.parts  # layers know all ranks
            calls = [calls_of(part, action, self.batch) for part in parts]
            by_axis: dict[str, list[PredictedCall]] = {}
            for call in _joined(calls):
                by_axis.setdefault(call.axis, []).append(call)
            self.known[key] = [(axis, self.elapsed(found)) for axis, found in by_axis.items()]
        return self.known[key]

    def elapsed(self, calls: Sequence[PredictedCall]) -> float:
        """Return the seconds of some calls: of the same ranks one after the other."""
        ends: dict[int, float] = {}
        for call in calls:
            ranks = [rank for group in call.groups or () for rank in group]
            begin = max((ends.get(rank, 0.0) for rank in ranks), default=0.0)
            ends.update(dict.fromkeys(ranks, begin + self.prices.of(call)))
        return max(ends.values(), default=0.0)


def _joined(parts: Iterable[Iterable[PredictedCall]]) -> Iterator[PredictedCall]:
    """Yield the calls that groups make at the same time as one call of all these groups.

    `parts`: the calls of ranks with each part of the model; a group may be of several parts.
    """
    times: dict[PredictedCall, Counter[tuple[int, ...]]] = {}
    for calls in parts:
        found: dict[PredictedCall, Counter[tuple[int, ...]]] = {}
        for call in calls:
            of_call = found.setdefault(replace(call, groups=None), Counter())
            of_call.update(call.groups or ())
        for call, of_part in found.items():
            times[call] = times.get(call, Counter()) | of_part
    for call, of_groups in times.items():
        for number in sorted(set(of_groups.values())):
            groups = tuple(group for group, count in of_groups.items() if count == number)
            yield replace(call, groups=groups, num_calls=number * call.num_calls)
