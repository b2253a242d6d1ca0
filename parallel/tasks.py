"""A training step as tasks of all ranks, which `collectives.export` writes for other simulators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from collectives.export import Machine, Stream, Task, programs, tag
from parallel.accounts import PredictedCall
from parallel.accounts.calls import POINT_TO_POINT
from parallel.actions import Action
from parallel.lowering import SENDS
from parallel.runtime import Trainer
from parallel.runtime.state import BatchSize

STARTED = ("UNSHARD", "REDUCE", "AVERAGE")  # whose calls go on while the rank computes
PARTS = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}  # of the time of the forward of a layer


def step_tasks(
    trainer: Trainer,
    machine: Machine,
    *,
    layer_seconds: float = 0.0,
    batch: tuple[int, int] | None = None,
) -> list[list[Task]]:
    """Return the tasks of each rank in one step, without sending or computing anything.

    A rank does its actions in order.  It goes on while parameters are gathered and gradients are
    summed, and waits for them where a layer needs them, or at a WAIT; it waits for the messages of
    a stage when it computes with them.  `collectives.export.write` writes tasks to files.

    Parameters
    ----------
    trainer : Trainer
        Of any rank, with a communicator.
    machine : collectives.export.Machine
        What copies and combinations cost.
    layer_seconds : float
        The time of the forward of a layer for a micro-batch; backward takes twice as long.
    batch : (rows, context), optional
        The shape of the targets of all ranks; needed if layers send messages.

    Returns
    -------
    list of list of collectives.export.Task
        With exactly the messages that `Trainer.traffic` predicts for a step.
    """
    states = [trainer.as_of(rank) for rank in range(trainer.mesh.size)]
    whole = None if batch is None else BatchSize(*batch, 0)
    numbers: dict[tuple[Any, ...], int] = {}
    return [
        _Rank(rank, states, machine, layer_seconds, whole, numbers).step()
        for rank in range(len(states))
    ]


class _Rank:
    """The tasks of one rank.  `numbers`: those of the calls, which are the same on all ranks."""

    def __init__(
        self,
        rank: int,
        states: Sequence[Trainer],
        machine: Machine,
        layer_seconds: float,
        batch: BatchSize | None,
        numbers: dict[tuple[Any, ...], int],
    ) -> None:
        self.rank, self.states, self.state = rank, states, states[rank]
        self.machine, self.layer_seconds = machine, layer_seconds
        self.batch, self.numbers = batch, numbers
        self.tasks: list[Task] = []
        self.main = Stream(self.tasks)
        self.gathers: dict[str, Stream] = {}  # by the unit that they gather
        self.started: list[Stream] = []  # that a WAIT waits for
        self.sends: list[int] = []
        self.arriving: dict[tuple[int, int | None, str], int] = {}  # of the input of a computation
        self.num_calls: Counter[tuple[Any, ...]] = Counter()

    def step(self) -> list[Task]:
        for action in self.state.actions:
            if action.kind in PARTS:
                self.compute(action)
            elif action.kind in STARTED:
                self.start(action)
            elif action.kind == "WAIT":
                self.wait(action)
            elif action.kind.startswith("SEND"):
                self.sends.append(self.main.post(self.message(action, "send")))
            elif action.kind.startswith("RECV"):
                self.receive(action)
            else:
                self.call(action, self.main)
        return self.tasks

    def compute(self, action: Action) -> None:
        """Wait for the parameters and the input of a layer, compute it, and send what it sends."""
        for unit in self.state.model.units_of(action.part):
            if unit in self.gathers:
                self.main.wait(self.gathers.pop(unit).ready)
        direction = "F" if action.kind == "F" else "B"
        arrived = self.arriving.pop((action.stage, action.micro_batch, direction), None)
        if arrived is not None:
            self.main.wait([arrived])
        self.main.work(self.layer_seconds * PARTS[action.kind], is_compute=True)
        self.call(action, self.main)

    def start(self, action: Action) -> None:
        """Begin calls that go on beside what follows."""
        stream = Stream(self.tasks, self.main.ready)
        self.call(action, stream)
        if action.kind == "UNSHARD" and "parameters" in self.state.sharding.divided:
            self.gathers[action.part] = stream
        else:
            self.started.append(stream)

    def wait(self, action: Action) -> None:
        """Wait for all sums that were started, or for all messages to other stages."""
        if action.part == SENDS:
            self.main.wait(self.sends)
            self.sends = []
            return
        for stream in self.started:
            self.main.wait(stream.ready)
        self.started = []

    def receive(self, action: Action) -> None:
        """Begin to receive the input of a stage, for which its first computation waits."""
        number = self.main.post(self.message(action, "receive"))
        self.arriving[action.stage, action.micro_batch, action.kind[-1]] = number

    def call(self, action: Action, stream: Stream) -> None:
        """Run the calls of an action that this rank takes part in."""
        for call in self.state.calls_of(action, self.batch):
            groups = call.groups or (tuple(range(len(self.states))),)
            mine = [group for group in groups if self.rank in group and len(group) > 1]
            for _ in range(call.num_calls if mine else 0):
                if call.collective in POINT_TO_POINT:
                    self.exchange(call, mine, stream)
                else:
                    self.collective(call, mine[0], stream)

    def collective(self, call: PredictedCall, group: tuple[int, ...], stream: Stream) -> None:
        """Run a collective in a group of ranks."""
        (program,) = programs(
            call.collective, len(group), call.counts, itemsize=call.itemsize,
            algorithm=call.algorithm, root=call.root, in_place=call.in_place,
            ranks=[group.index(self.rank)],
        )  # fmt: skip
        stream.run(program, self.machine, group, self.number(call.axis, group))

    def exchange(
        self,
        call: PredictedCall,
        pairs: Iterable[tuple[int, ...]],
        stream: Stream,
    ) -> None:
        """Send and receive the messages of a call, and wait for all of them."""
        posted = []
        for source, destination in pairs:
            number = self.number(call.axis, (source, destination))
            kind: Literal["send", "receive"] = "send" if source == self.rank else "receive"
            peer = destination if source == self.rank else source
            task = Task(kind, call.itemsize * call.counts, peer, tag(number))
            posted.append(stream.post(task))
        stream.wait(posted)

    def number(self, axis: str, group: tuple[int, ...]) -> int:
        """Return the number of the next call along an axis in this group."""
        self.num_calls[axis, group] += 1
        return self.numbers.setdefault((axis, self.num_calls[axis, group]), len(self.numbers))

    def message(self, action: Action, kind: Literal["send", "receive"]) -> Task:
        """Return a message between stages, of which the sender knows the size."""
        message = self.state.stages.message(action)
        group = next(each for each in self.state.mesh.ranks("pipe") if self.rank in each)
        peer = group[message.peer]
        ends = (self.rank, peer) if kind == "send" else (peer, self.rank)
        sent = action._replace(kind=f"SEND_{message.direction}", stage=message.source)
        calls = self.states[ends[0]].calls_of(sent, self.batch)
        call = next(call for call in calls if ends in (call.groups or ()))
        number = self.numbers.setdefault(("pipe", message.tag), len(self.numbers))
        size = call.itemsize * call.counts
        return Task(kind, size, peer, tag(number))
