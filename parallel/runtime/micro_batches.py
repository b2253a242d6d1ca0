"""What a rank computes in a step: micro-batches on their way through its layers, and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import collectives
from parallel.accounts import Event
from parallel.actions import Action
from parallel.nn import Array, ArraySpec, BatchRows, Layer, Step
from parallel.placement import span
from parallel.places import OFFLOADED, Place
from parallel.runtime.overlap import Overlap
from parallel.runtime.stash import WeightStash
from parallel.runtime.state import State
from parallel.runtime.turns import Turns
from parallel.stages import Message
from parallel.text import Tokens

Half: TypeAlias = Callable[[Layer, Any, Any], tuple[Any, Any]]
"""Called with a layer, dy and what forward saved; returns dx and what the other half needs."""


class MicroBatches:
    """The micro-batches in progress, and the messages that bring them from stage to stage.

    Parameters
    ----------
    state : State
        Of the rank whose layers run.
    place : Place
        Where activations are between forward and backward.
    overlap : Overlap
        Is told how long this rank waits for messages.
    turns : Turns
        Of a forward and a backward that overlap.

    Attributes
    ----------
    loss : float or array
        This rank's part of the loss of the step: a number, which is on the device of the model.
    used_layers : set of str
        Those of which backward has run in this step.
    num_recomputed : int
        How many forward passes of layers ran again, in all steps.
    events : list of Event
        What this rank did in this step, and when.
    stash : WeightStash, optional
        The versions of parameters, if the schedule updates them while micro-batches are in
        progress.
    """

    def __init__(self, state: State, place: Place, overlap: Overlap, turns: Turns) -> None:
        self.state, self.model, self.stages = state, state.model, state.stages
        self.place, self.overlap, self.turns = place, overlap, turns
        self.loss: Array = 0.0
        self.num_recomputed = 0
        self.used_layers: set[str] = set()
        self.events: list[Event] = []
        is_asynchronous = state.stages.schedule.is_asynchronous
        self.stash = WeightStash(state.memory) if is_asynchronous else None
        self._last_layer = list(state.model.layers)[-1]
        # What enters the next layer of a stage: of a micro-batch forward ("F"), its activations, or
        # backward ("B"), its derivatives; or the function that waits for a message with them.
        self._entering: dict[tuple[str, int, int], Any] = {}
        self._steps: dict[int, Step] = {}
        self._active: dict[int, list[str]] = {}  # the layers that run on each micro-batch
        self._saved: dict[tuple[int, str], Any] = {}
        self._rests: dict[tuple[int, str], Any] = {}  # from one half of backward to the other
        self._sending: dict[tuple[str, int], tuple[Any, int]] = {}  # by direction and stage

    def begin(
        self, inputs: Tokens, targets: Tokens, totals: Sequence[int], number: int = 0
    ) -> None:
        """Set the micro-batches of a step, and forget those of the last one.

        `inputs` and `targets` are the rows of this rank (`Trainer.train`).  `totals` are the
        numbers of targets of all ranks over which the loss of each micro-batch is a mean.  `number`
        is that of the step.  Raises ValueError if a layer needs to know which rows these are, and
        they are not those that this rank has of a batch divided evenly.
        """
        self.end()
        self.loss, state = 0.0, self.state
        is_sum = self.stash is None  # of micro-batches; else a mean of their means
        self._total = totals[0] if is_sum else sum(totals)
        self.used_layers.clear()
        self.events.clear()
        context, scale = targets.shape[1], state.loss_scale.value
        positions = state.positions_of(context, state.place)
        if positions is not None:
            inputs, targets = inputs[:, positions], targets[:, positions]
        for k in range(state.recipe.num_micro_batches):
            rows = span(len(inputs), state.recipe.num_micro_batches, k)
            on_host = inputs[rows], targets[rows]
            tokens, classes = map(state.xp.asarray, on_host)
            self._entering["F", 0, k] = tokens
            self._steps[k] = Step(
                classes, totals[k], k, positions=positions,
                context=context, loss_scale=scale, track=self._track,
                pass_turn=self.turns.pass_on,
                is_reference=self.overlap.is_reference, add_wait=self.overlap.add,
                tokens=tokens, copied={id(tokens): on_host[0], id(classes): on_host[1]},
                batch=self._rows(self._total // context, k, number, tokens.shape[0]),
            )  # fmt: skip

    def _rows(self, num_rows: int, k: int, number: int, mine: int) -> BatchRows | None:
        """Return which rows of the batch each rank has in micro-batch `k` of step `number`."""
        found = self.state.rows_of_ranks(num_rows, k, number)
        if found is not None and len(found.of_rank[self.state.place]) != mine:
            raise ValueError(
                f"rank {self.state.place} has {mine} rows in micro-batch {k}, but of a batch of"
                f" {num_rows} rows that is divided evenly it has"
                f" {len(found.of_rank[self.state.place])}"
            )
        return found

    def end(self) -> None:
        """Forget the micro-batches."""
        self.num_recomputed += sum(step.num_recomputed for step in self._steps.values())
        for of_step in (self._entering, self._steps, self._active, self._saved, self._rests):
            of_step.clear()

    def _track(self, arrays: Any) -> Any:
        self.turns.in_order()
        return self.state.memory.track("activations", arrays)

    # Forward and backward

    def forward(self, action: Action) -> None:
        """Run a layer forward on a micro-batch, as `action` says."""
        name, number = action.part, number_of(action)
        if number not in self._active:
            self._active[number] = [*self.model.active_layers(), self._last_layer]
        x = self._take("F", action)
        if name in self._active[number]:
            x = self._forward(name, x, number)
        if name == self._last_layer:
            if getattr(x, "ndim", 0):
                raise ValueError(f"the last layer is {name}: to be trained, it must be a loss")
            self._add_loss(number, x)
        else:
            if is_end := name == self.stages.layers[action.stage][-1]:
                self._add_loss(number)  # that of its layers: the last one may be elsewhere
            self._entering["F", action.stage + is_end, number] = x

    def _add_loss(self, number: int, loss: Array = 0.0) -> None:
        """Add the losses of a micro-batch: that of the last layer, and those of others so far."""
        step = self._steps[number]
        self.loss += (loss + sum(step.losses)) * step.total / self._total
        step.losses.clear()

    def _forward(self, name: str, x: Array, number: int) -> Any:
        """Return the output of a layer for the input `x`, and save what its backward needs."""
        layer = self._bound(name, number)
        with self._phase(name):
            y, saved = layer.forward(x, self._steps[number])
        self._track(saved)
        if self.place.columns:
            saved = self.state.memory.track(OFFLOADED, self.place.put(saved))
        self._saved[number, name] = saved
        return y

    def backward(self, action: Action) -> None:
        """Run a layer backward on a micro-batch, as `action` says."""
        self._backward(action, lambda layer, dy, saved: (layer.backward(dy, saved), None))
        self._mark_used(action)

    def backward_input(self, action: Action) -> None:
        """Compute the derivative by the input of a layer, as `action` says."""
        rest = self._backward(action, lambda layer, dy, saved: layer.backward_input(dy, saved))
        self._rests[number_of(action), action.part] = self._track(rest)

    def backward_weight(self, action: Action) -> None:
        """Add to the gradients of a layer, as `action` says."""
        rest = self._rests.pop((number_of(action), action.part))
        if self._mark_used(action):
            self._bound(action.part, number_of(action)).backward_weight(rest)
        self.turns.in_order()  # before `rest` is freed

    def _backward(self, action: Action, half: Half) -> Any:
        """Let `half` compute the derivative of a layer; return what the other half needs."""
        name, number = action.part, number_of(action)
        dx = 1.0 if name == self._last_layer else self._take("B", action)
        rest = None
        if (number, name) in self._saved:
            layer, saved = self._bound(name, number), self._saved.pop((number, name))
            if self.place.columns:
                self.turns.in_order()
                saved = self._track(self.place.take(saved))
            with self._phase(name):
                dx, rest = half(layer, dx, saved)
            self.turns.in_order()  # before `saved` is freed
        is_end = name == self.stages.layers[action.stage][0]
        self._entering["B", action.stage - is_end, number] = dx
        return rest

    def _mark_used(self, action: Action) -> bool:
        """Return whether the layer of an `action` runs on its micro-batch."""
        is_used = action.part in self._active[number_of(action)]
        self.used_layers.update([action.part] * is_used)
        return is_used

    def _bound(self, name: str, number: int) -> Layer:
        """Return a layer bound to the parameters and gradients for a micro-batch."""
        parameters: Mapping[str, Array] = self.state.full_parameters
        if self.stash is not None:
            parameters = self.stash.parameters_of(number, parameters)
        self.model.bind(name, parameters, self.state.full_gradients)
        return self.model.layers[name]

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """Return the phase of what a layer sends itself."""
        return collectives.phase(name) if self.model.mesh.size > 1 else nullcontext()

    # Messages between stages

    def _take(self, direction: str, action: Action) -> Any:
        """Return what enters the layer of an `action`; wait for it if it is a message."""
        x = self._entering.pop((direction, action.stage, number_of(action)))
        if not callable(x):
            return x
        self.turns.pass_on()
        began = time.perf_counter()
        x = x()
        ended = time.perf_counter()
        self.overlap.add(ended - began)
        source = action.stage + (-1 if direction == "F" else 1)
        number = number_of(action)
        self.events.append(Event(f"SEND_{direction}", source, number, began, ended, is_wait=True))
        return x

    def receive(self, action: Action) -> None:
        """Start to receive what enters the stage of an `action`."""
        message, number = self.stages.message(action), number_of(action)
        shape = self._inputs(number)[message.layer].shape
        x = self.state.xp.empty(shape, dtype=self.state.dtype)
        work = self._start(self.state.comm_of(action.axes).recv, x, message)

        def arrive() -> Array:
            work.wait()
            self.state.memory.add("messages", -x.nbytes)
            return x

        self._entering[message.direction, message.target, number] = arrive

    def send(self, action: Action) -> None:
        """Start to send what leaves the stage of an `action`, after the message before it."""
        message, number = self.stages.message(action), number_of(action)
        x = self._entering.pop((message.direction, message.target, number))
        self._complete_send(message.direction, message.source)
        work = self._start(self.state.comm_of(action.axes).send, x, message)
        self._sending[message.direction, message.source] = work, x.nbytes

    def _start(self, call: Callable[..., Any], x: Array, message: Message) -> Any:
        self.state.memory.add("messages", x.nbytes)
        with collectives.phase(message.label):
            return call(x, message.peer, message.tag, async_op=True)

    def complete_sends(self) -> None:
        """Wait until all messages are sent."""
        for direction, stage in list(self._sending):
            self._complete_send(direction, stage)

    def _complete_send(self, direction: str, stage: int) -> None:
        if (direction, stage) in self._sending:
            work, nbytes = self._sending.pop((direction, stage))
            work.wait()
            self.state.memory.add("messages", -nbytes)

    def _inputs(self, number: int) -> dict[str, ArraySpec]:
        """Return what enters each layer for a micro-batch."""
        step, width = self._steps[number], self.state.dtype.itemsize
        rows, length = step.targets.shape
        tokens = ArraySpec.tokens(rows, length, width, context=step.context, rank=self.state.place)
        return self.state.inputs_of(tokens)


def number_of(action: Action) -> int:
    """Return the number of the micro-batch that an `action` computes."""
    assert action.micro_batch is not None
    return action.micro_batch
