"""A training step as tasks of all ranks, which `collectives.export` writes for other simulators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any, Literal

from collectives.export import Machine, Stream, Task, programs, tag
from parallel.accounts import POINT_TO_POINT, PredictedCall
from parallel.layout import BatchSize, Layout, RankView
from parallel.predict.walk import walk
from parallel.step import Action, Receive, Send, StageMessage, lower


def step_tasks(
    layout: Layout,
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
    layout : Layout
    machine : collectives.export.Machine
        What copies and combinations cost.
    layer_seconds : float
        The time of the forward of a layer for a micro-batch; each half of backward takes as long,
        and a layer that is computed again once more.
    batch : (rows, context), optional
        The shape of the targets of all ranks; needed if layers send messages.

    Returns
    -------
    list of list of collectives.export.Task
        They have exactly the messages that `Trainer.traffic` predicts for a step.
    """
    views = [RankView(layout, rank) for rank in range(layout.mesh.size)]
    whole = None if batch is None else BatchSize(*batch, 0)
    numbers: dict[Hashable, int] = {}
    tasks = []
    for view in views:
        clock = TaskClock(view, views, machine, layer_seconds, whole, numbers)
        for _ in walk(view, lower(view), clock):
            raise AssertionError("all messages are known")
        tasks.append(clock.tasks)
    return tasks


class TaskClock:
    """A rank whose time is a list of tasks.  `numbers` number the calls, alike on all ranks."""

    def __init__(
        self,
        view: RankView,
        views: list[RankView],
        machine: Machine,
        layer_seconds: float,
        batch: BatchSize | None,
        numbers: dict[Hashable, int],
    ) -> None:
        self.view, self.views, self.machine = view, views, machine
        self.layer_seconds, self.batch, self.numbers = layer_seconds, batch, numbers
        self.tasks: list[Task] = []
        self._main = Stream(self.tasks)
        self._started: dict[Hashable, list[int]] = {}  # the tasks that end what was started
        self._num_calls: Counter[tuple[Any, ...]] = Counter()

    def compute(self, action: Action) -> None:
        """Add the computation of a layer."""
        seconds = action.seconds(self.view.model, lambda _: self.layer_seconds)
        self._main.work(seconds, is_compute=True)

    def call(self, action: Action) -> None:
        """Add the calls of an action, for which the rank waits."""
        self._calls(action, self._main)

    def start(self, action: Action, name: Hashable) -> None:
        """Add calls that go on beside what follows, or an end of a message between stages."""
        ends = self._started.setdefault(name, [])
        if isinstance(action, StageMessage):
            ends.append(self._main.post(self._message(action)))
        else:
            stream = Stream(self.tasks, self._main.ready)
            self._calls(action, stream)
            ends += stream.ready

    def is_known(self, name: Hashable) -> bool:
        """Return True: a task waits for whatever comes."""
        return True

    def wait(self, name: Hashable) -> None:
        """Wait for what was started under a name."""
        if name in self._started:
            self._main.wait(self._started.pop(name))

    def _calls(self, action: Action, stream: Stream) -> None:
        """Run the calls of an action in which this rank takes part."""
        rank = self.view.rank
        for call in action.sends(self.view, self.batch):
            groups = call.groups or (tuple(range(len(self.views))),)
            mine = [group for group in groups if rank in group and len(group) > 1]
            for _ in range(call.num_calls if mine else 0):
                if call.collective in POINT_TO_POINT:
                    self._exchange(call, mine, stream)
                else:
                    self._collective(call, mine[0], stream)

    def _collective(self, call: PredictedCall, group: tuple[int, ...], stream: Stream) -> None:
        """Run a collective in a group of ranks."""
        (program,) = programs(
            call.collective,
            len(group),
            call.counts,
            itemsize=call.itemsize,
            algorithm=call.algorithm,
            root=call.root,
            in_place=call.in_place,
            ranks=[group.index(self.view.rank)],
        )
        stream.run(program, self.machine, group, self._number(call.axis, group))

    def _exchange(
        self, call: PredictedCall, pairs: Iterable[tuple[int, ...]], stream: Stream
    ) -> None:
        """Send and receive the messages of a call, and wait for all of them."""
        posted, rank = [], self.view.rank
        for source, destination in pairs:
            number = self._number(call.axis, (source, destination))
            kind: Literal["send", "receive"] = "send" if source == rank else "receive"
            peer = destination if source == rank else source
            task = Task(kind, call.itemsize * call.counts, peer, tag(number))
            posted.append(stream.post(task))
        stream.wait(posted)

    def _number(self, axis: str, group: tuple[int, ...]) -> int:
        """Return the number of the next call along an axis in this group."""
        self._num_calls[axis, group] += 1
        return self.numbers.setdefault((axis, self._num_calls[axis, group]), len(self.numbers))

    def _message(self, action: StageMessage) -> Task:
        """Return the end of a message between stages, whose size the sender knows."""
        rank, is_sent = self.view.rank, isinstance(action, Send)
        group = next(group for group in self.view.mesh.ranks("pipe") if rank in group)
        peer = group[action.message.peer]
        sender, ends = (self.view, (rank, peer)) if is_sent else (self.views[peer], (peer, rank))
        sent = action.sent_by(self.view) if isinstance(action, Receive) else action
        call = next(x for x in sent.sends(sender, self.batch) if ends in (x.groups or ()))
        number = self.numbers.setdefault(("pipe", action.message.tag), len(self.numbers))
        kind: Literal["send", "receive"] = "send" if is_sent else "receive"
        return Task(kind, call.itemsize * call.counts, peer, tag(number))
