"""What a rank computes in a step: micro-batches on their way through its layers, and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import collectives
from parallel.accounts import Event
from parallel.layout import Message
from parallel.mesh import length, span
from parallel.nn import Array, ArraySpec, BatchRows, Layer, Step
from parallel.optim import OFFLOADED, Storage
from parallel.run.arrays import RankArrays
from parallel.run.computing.alternation import Alternation
from parallel.run.computing.overlap import Overlap
from parallel.run.computing.stash import WeightStash
from parallel.run.computing.units import Units
from parallel.step import (
    LayerAction,
    LayerBackward,
    LayerBackwardInput,
    LayerBackwardWeight,
    LayerForward,
    Receive,
    Send,
    WaitForSends,
)
from parallel.text import Tokens

Half: TypeAlias = Callable[[Layer, Any, Any], tuple[Any, Any]]
"""Called with a layer, dy and what forward saved; returns dx and what the other half needs."""


class MicroBatches:
    """The micro-batches in progress, and the messages that bring them from stage to stage.

    Parameters
    ----------
    arrays : RankArrays
        The arrays of the rank whose layers run.
    units : Units
        Has the parameters that layers wait for.
    storage : Storage
        Where activations are between forward and backward.
    overlap : Overlap
        Is told how long this rank waits for messages.
    alternation : Alternation
        The turns of a forward and a backward that overlap.

    Attributes
    ----------
    loss : float or array
        This rank's part of the loss of the step: a number, which is on the device of the model.
    used_layers : set of str
        The layers whose backward has run in this step.
    num_recomputed : int
        How many forward passes of layers ran again, in all steps.
    events : list of Event
        What this rank did in this step, and when.
    saved, rests : dict of (int, str) to any
        By micro-batch and layer, what is saved for backward, and for its second half.
    stash : WeightStash, optional
        The versions of parameters, if the schedule updates them while micro-batches are in
        progress.
    """

    def __init__(
        self,
        arrays: RankArrays,
        units: Units,
        storage: Storage,
        overlap: Overlap,
        alternation: Alternation,
    ) -> None:
        self.arrays, self.units, view = arrays, units, arrays.view
        self.model, self.stages = view.model, view.stages
        self.storage, self.overlap, self.alternation = storage, overlap, alternation
        self.loss: Array = 0.0
        self.num_recomputed = 0
        self.used_layers: set[str] = set()
        self.events: list[Event] = []
        is_asynchronous = self.stages.schedule.is_asynchronous
        self.stash = WeightStash(arrays.memory) if is_asynchronous else None
        may_be_freed = {"gradients", "parameters"} & view.sharding.divided
        self._must_unbind = bool(may_be_freed) or is_asynchronous
        self._last_layer = list(self.model.layers)[-1]
        # The input of the next layer of a stage, by direction, stage and micro-batch: activations
        # ("F") or derivatives ("B"), or the function that waits for a message with them.
        self._entering: dict[tuple[str, int, int], Any] = {}
        self._steps: dict[int, Step] = {}
        self._active: dict[int, list[str]] = {}  # the layers that run on each micro-batch
        self.saved: dict[tuple[int, str], Any] = {}
        self.rests: dict[tuple[int, str], Any] = {}
        self._sending: dict[tuple[str, int], tuple[Any, int]] = {}  # by direction and stage

    def begin(self, inputs: Tokens, targets: Tokens, total: int, number: int = 0) -> None:
        """Set the micro-batches of a step, and forget the micro-batches before.

        Parameters
        ----------
        inputs, targets : array
            The rows of this rank, as in `Trainer.train`.
        total : int
            The number of targets of all ranks, over which the loss is a mean.
        number : int
            The number of the step.

        Raises
        ------
        ValueError
            If a layer needs to know its rows, and this rank does not have its even part of the
            batch; and if a micro-batch has no rows, but an update of its own.
        """
        self.end()
        self.loss, arrays, view = 0.0, self.arrays, self.arrays.view
        totals = self.totals(total, targets.shape[1])
        is_sum = self.stash is None  # of micro-batches; else a mean of their means
        self._total = total if is_sum else sum(totals)
        self.used_layers.clear()
        self.events.clear()
        context, scale = targets.shape[1], arrays.loss_scale.value
        positions = view.layout.positions_of(context, view.rank)
        if positions is not None:
            inputs, targets = inputs[:, positions], targets[:, positions]
        for k in range(view.recipe.num_micro_batches):
            rows = span(len(inputs), view.recipe.num_micro_batches, k)
            on_host = inputs[rows], targets[rows]
            tokens, classes = map(arrays.xp.asarray, on_host)
            self._entering["F", 0, k] = tokens
            self._steps[k] = Step(
                classes,
                totals[k],
                positions=positions,
                context=context,
                loss_scale=scale,
                track=self._track,
                pass_turn=self.alternation.pass_on,
                is_reference=self.overlap.is_reference,
                add_wait=self.overlap.add,
                tokens=tokens,
                copied={id(tokens): on_host[0], id(classes): on_host[1]},
                batch=self._rows(self._total // context, k, number, tokens.shape[0]),
            )

    def totals(self, total: int, context: int) -> list[int]:
        """Return the number of tokens over which the loss of each micro-batch is a mean."""
        view = self.arrays.view
        num_parts, num_ranks = view.recipe.num_micro_batches, view.layout.batch_part(view.rank)[1]
        if self.stash is None:
            return [total] * num_parts
        of_ranks = [length(span(total // context, num_ranks, rank)) for rank in range(num_ranks)]
        rows = [sum(length(span(n, num_parts, k)) for n in of_ranks) for k in range(num_parts)]
        if not all(rows):
            raise ValueError(
                f"a batch of {total // context} rows leaves micro-batch {rows.index(0)} of"
                f" {num_parts} without rows, of which pipedream would update by a mean"
            )
        return [context * n for n in rows]

    def _rows(self, num_rows: int, k: int, number: int, mine: int) -> BatchRows | None:
        """Return which rows of the batch each rank has in micro-batch `k` of step `number`."""
        view = self.arrays.view
        rows = view.layout.rows_of_ranks(num_rows, k, number)
        if rows is not None and len(rows.of_rank[view.rank]) != mine:
            raise ValueError(
                f"rank {view.rank} has {mine} rows in micro-batch {k}, but of a batch of"
                f" {num_rows} rows that is divided evenly it has {len(rows.of_rank[view.rank])}"
            )
        return rows

    def end(self) -> None:
        """Forget the micro-batches."""
        self.num_recomputed += sum(step.num_recomputed for step in self._steps.values())
        for of_step in (self._entering, self._steps, self._active, self.saved, self.rests):
            of_step.clear()

    def _track(self, arrays: Any) -> Any:
        self.alternation.in_order()
        return self.arrays.memory.track("activations", arrays)

    # Forward and backward

    def forward(self, action: LayerForward) -> None:
        """Compute the output of a layer."""
        self.units.complete(action.layer)
        self._pass_forward(action)
        self._unbind(action.layer)

    def _pass_forward(self, action: LayerForward) -> None:
        name, number = action.layer, action.micro_batch
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
                self._add_loss(number)  # the last layer may be on another rank
            self._entering["F", action.stage + is_end, number] = x

    def _add_loss(self, number: int, loss: Array = 0.0) -> None:
        """Add the losses of a micro-batch: of the last layer, and of the other layers so far."""
        step = self._steps[number]
        self.loss += (loss + sum(step.losses)) * step.total / self._total
        step.losses.clear()

    def _forward(self, name: str, x: Array, number: int) -> Any:
        """Return the output of a layer for the input `x`, and save what its backward needs."""
        layer = self._bound(name, number)
        with self._phase(name):
            y, saved = layer.forward(x, self._steps[number])
        self._track(saved)
        if self.storage.columns:
            saved = self.arrays.memory.track(OFFLOADED, self.storage.put(saved))
        self.saved[number, name] = saved
        return y

    def backward(self, action: LayerBackward) -> None:
        """Compute the derivative by the input of a layer, and add to its gradients."""
        self.units.complete(action.layer)
        self.units.open_gradients(action.layer)
        self._backward(action, lambda layer, dy, saved: (layer.backward(dy, saved), None))
        self._mark_used(action)
        self._unbind(action.layer)

    def backward_input(self, action: LayerBackwardInput) -> None:
        """Compute the derivative by the input of a layer."""
        self.units.complete(action.layer)
        rest = self._backward(action, lambda layer, dy, saved: layer.backward_input(dy, saved))
        self.rests[action.micro_batch, action.layer] = self._track(rest)
        self._unbind(action.layer)

    def backward_weight(self, action: LayerBackwardWeight) -> None:
        """Add to the gradients of a layer."""
        self.units.open_gradients(action.layer)
        rest = self.rests.pop((action.micro_batch, action.layer))
        if self._mark_used(action):
            self._bound(action.layer, action.micro_batch).backward_weight(rest)
        self.alternation.in_order()  # before `rest` is freed
        self._unbind(action.layer)

    def _unbind(self, layer: str) -> None:
        """Let a layer forget arrays that may be freed."""
        if self._must_unbind:
            self.model.unbind(layer)

    def _backward(self, action: LayerAction, half: Half) -> Any:
        """Let `half` compute the derivative of a layer; return what the other half needs."""
        name, number = action.layer, action.micro_batch
        dx = 1.0 if name == self._last_layer else self._take("B", action)
        rest = None
        if (number, name) in self.saved:
            layer, saved = self._bound(name, number), self.saved.pop((number, name))
            if self.storage.columns:
                self.alternation.in_order()
                saved = self._track(self.storage.take(saved))
            with self._phase(name):
                dx, rest = half(layer, dx, saved)
            self.alternation.in_order()  # before `saved` is freed
        is_end = name == self.stages.layers[action.stage][0]
        self._entering["B", action.stage - is_end, number] = dx
        return rest

    def _mark_used(self, action: LayerAction) -> bool:
        """Return whether the layer of an `action` runs on its micro-batch."""
        is_used = action.layer in self._active[action.micro_batch]
        self.used_layers.update([action.layer] * is_used)
        return is_used

    def _bound(self, name: str, number: int) -> Layer:
        """Return a layer bound to the parameters and gradients for a micro-batch."""
        parameters: Mapping[str, Array] = self.arrays.full_parameters
        if self.stash is not None:
            parameters = self.stash.parameters_of(number, parameters)
        self.model.bind(name, parameters, self.arrays.full_gradients)
        return self.model.layers[name]

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """Return the phase of what a layer sends itself."""
        return collectives.phase(name) if self.model.mesh.size > 1 else nullcontext()

    # Messages between stages

    def _take(self, direction: str, action: LayerAction) -> Any:
        """Return what enters the layer of an `action`; wait for it if it is a message."""
        x = self._entering.pop((direction, action.stage, action.micro_batch))
        if not callable(x):
            return x
        self.alternation.pass_on()
        began = time.perf_counter()
        x = x()
        ended = time.perf_counter()
        self.overlap.add(ended - began)
        source = action.stage + (-1 if direction == "F" else 1)
        number = action.micro_batch
        self.events.append(Event(f"SEND_{direction}", source, number, began, ended, is_wait=True))
        return x

    def receive(self, action: Receive) -> None:
        """Start to receive what enters the stage of an `action`."""
        message = action.message
        shape = self._inputs(message.micro_batch)[message.layer].shape
        x = self.arrays.xp.empty(shape, dtype=self.arrays.view.dtype)
        work = self._start(self.arrays.comm_of(action.axes).recv, x, message)

        def arrive() -> Array:
            work.wait()
            self.arrays.memory.add("messages", -x.nbytes)
            return x

        self._entering[message.direction, message.target, message.micro_batch] = arrive

    def send(self, action: Send) -> None:
        """Start to send what leaves the stage of an `action`, after the message before it."""
        message = action.message
        x = self._entering.pop((message.direction, message.target, message.micro_batch))
        self._complete_send(message.direction, message.source)
        work = self._start(self.arrays.comm_of(action.axes).send, x, message)
        self._sending[message.direction, message.source] = work, x.nbytes

    def _start(self, call: Callable[..., Any], x: Array, message: Message) -> Any:
        self.arrays.memory.add("messages", x.nbytes)
        with collectives.phase(message.label):
            return call(x, message.peer, message.tag, async_op=True)

    def complete_sends(self, action: WaitForSends | None = None) -> None:
        """Wait until all messages are sent."""
        for direction, stage in list(self._sending):
            self._complete_send(direction, stage)

    def _complete_send(self, direction: str, stage: int) -> None:
        if (direction, stage) in self._sending:
            work, nbytes = self._sending.pop((direction, stage))
            work.wait()
            self.arrays.memory.add("messages", -nbytes)

    def _inputs(self, number: int) -> dict[str, ArraySpec]:
        """Return what enters each layer for a micro-batch."""
        step, view = self._steps[number], self.arrays.view
        rows, length = step.targets.shape
        tokens = ArraySpec.tokens(
            rows, length, view.dtype.itemsize, context=step.context, rank=view.rank
        )
        return view.layout.inputs_of(tokens)
