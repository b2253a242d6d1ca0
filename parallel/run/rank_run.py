"""What a rank trains with: its arrays, and the parts that do the actions of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import numpy as numpy_namespace

from parallel import step as actions
from parallel.accounts import Event, PhaseFunction
from parallel.layout import RankView
from parallel.optim import Offload
from parallel.run.arrays import RankArrays
from parallel.run.computing import Alternation, MicroBatches, Overlap, Units
from parallel.run.scalars import Scalars
from parallel.run.updates import Updates
from parallel.step import Action, LayerAction, Reshard, Update, lower
from parallel.text import Tokens

ActionFunction: TypeAlias = Callable[[Any], bool | None]
"""Does an action; returns False if the rest of the step must be skipped."""

ON_THIS_RANK = LayerAction, Update, Reshard  # these wait for no other rank, except in a layer


class RankRun:
    """The arrays of a rank in training, and the parts that do the actions of a step with them.

    Parameters
    ----------
    view : RankView
    phase : function
        Marks the phases.

    Attributes
    ----------
    model, recipe, sharding, stages
        As in `Layout`.
    layout, view : Layout, RankView
        How all ranks divide the training, and what this rank has.
    mesh, comm, rank, size
        The mesh of all ranks, their communicator (None if there is one rank alone), this rank, and
        the number of ranks.
    actions : list of Action
        The actions of each step.
    functions : dict of type to function
        The function that does each kind of action.
    arrays : RankArrays
        The parameters and the gradients; `memory` counts them.
    masters : dict of str to array
        What the optimizer updates: parts of the parameters, or copies in the dtype of updates.
    optimizer, offload, activations, loss_scale
        Made as the recipe says.
    micro_batches : MicroBatches
        What is computed in the step that is in progress.
    units : Units
        The parameters that are being gathered, and the gradients that are being summed.
    scalars : Scalars
        The loss, the norm, and the other numbers that ranks add up.
    updates : Updates
        Changes the parameters, and counts how often.
    alternation : Alternation
        The turns of a forward and a backward that overlap.
    takes_turns : bool
        Whether a forward and a backward that overlap take turns, so that one goes on while the
        other waits.  On a device, where the host waits for nothing, their layers follow each other.
    overlap : Overlap
        The time for which this rank waited, with and without computation at the same time; none if
        the model is on a device.
    num_batches : int
        The batches computed.
    """

    def __init__(self, view: RankView, phase: PhaseFunction) -> None:
        self.model, self.recipe, self.phase = view.model, view.recipe, phase
        self.sharding, self.stages = view.sharding, view.stages
        self.arrays = arrays = RankArrays(view)
        self.set_view(view)
        self.memory, self.loss_scale = arrays.memory, arrays.loss_scale
        self.parameters, self.gradients = arrays.parameters, arrays.gradients
        self.num_batches = 0
        self.activations = self.recipe.offload_activations(view.rank, arrays.xp)
        self.offload = Offload(
            self.recipe.offload(view.rank, arrays.xp), arrays.parameter_shards, arrays.memory
        )
        self.masters = self.offload.masters
        self.overlap, self.alternation = Overlap(), Alternation()
        self.units = Units(arrays, self.masters, self.overlap)
        self.micro_batches = MicroBatches(
            arrays, self.units, self.activations, self.overlap, self.alternation
        )
        self.scalars = Scalars(arrays, self.micro_batches)
        self.updates = Updates(arrays, self.offload, self.scalars, self.micro_batches.stash)
        self.optimizer = self.updates.optimizer
        self.actions, self.functions = lower(view), self._functions()
        self.is_on_host = arrays.xp is numpy_namespace  # so that the host can time what it does
        self.takes_turns = self.is_on_host

    def set_view(self, view: RankView) -> None:
        """Go on as the rank of a `view`, which has the same part of the model."""
        self.view = self.arrays.view = view
        self.layout, self.mesh = view.layout, view.mesh
        self.comm, self.rank, self.size = self.mesh.comm, self.mesh.rank, self.mesh.size

    def _functions(self) -> dict[type[Action], ActionFunction]:
        """Return the function that does each kind of action."""
        micro_batches, units, scalars = self.micro_batches, self.units, self.scalars
        return {
            actions.LayerForward: micro_batches.forward,
            actions.LayerBackward: micro_batches.backward,
            actions.LayerBackwardInput: micro_batches.backward_input,
            actions.LayerBackwardWeight: micro_batches.backward_weight,
            actions.Send: micro_batches.send,
            actions.Receive: micro_batches.receive,
            actions.WaitForSends: micro_batches.complete_sends,
            actions.Unshard: units.unshard,
            actions.Reshard: units.reshard,
            actions.Reduce: units.reduce,
            actions.Average: units.average,
            actions.WaitForCalls: units.wait,
            actions.FindUnused: scalars.find_unused,
            actions.SumLoss: scalars.sum_loss,
            actions.SumNorm: scalars.sum_norm,
            actions.SendNorm: scalars.send_norm,
            actions.SumCounts: scalars.sum_counts,
            actions.Update: self.updates.update,
        }

    # A step

    def begin(self, inputs: Tokens, targets: Tokens, total: int, number: int = 0) -> None:
        """Set the micro-batches that the next actions compute, and set gradients to 0.

        `inputs`, `targets` and `total` are as in `Trainer.step`; `number` numbers the steps.
        """
        rows, context = total // targets.shape[1], targets.shape[1]
        self.layout.check_batch(rows, context, inputs.shape[1:])
        if self.is_on_host:
            self.overlap.begin()
        self.num_batches += 1
        self.updates.zero_gradients()
        share = 1.0
        if self.sharding.every is not None:  # the gradient is the mean over the rank's own rows
            share, total = targets.size / total, targets.size
        self.scalars.begin(share)
        self.micro_batches.begin(inputs, targets, total, number)

    def run(self, actions: Iterable[Action]) -> None:
        """Do some actions, up to an update that must be skipped; see `begin`."""
        takes_turns = self.takes_turns and not self.overlap.is_reference
        with self._ignore_overflow():
            for slot, group in groupby(actions, attrgetter("slot")):
                if slot is not None and takes_turns:
                    self.alternation.run(list(group), self.do, self.phase, self._record)
                elif not self._run_in_order(group):
                    return

    def _ignore_overflow(self) -> AbstractContextManager[object]:
        """Return a context manager without NumPy's overflow warnings if the loss scale changes."""
        is_dynamic = self.loss_scale.is_dynamic
        return np.errstate(over="ignore", invalid="ignore") if is_dynamic else nullcontext()

    def _run_in_order(self, actions: Iterable[Action]) -> bool:
        """Do one action after the other; return whether none must be skipped."""
        for label, group in groupby(actions, attrgetter("phase")):
            with self.phase(label) if label else nullcontext():
                for action in group:
                    began = time.perf_counter()
                    if self.do(action) is False:
                        return False
                    self._record(action, began, time.perf_counter())
        return True

    def do(self, action: Action) -> bool | None:
        """Do one action; return False if the rest of the step must be skipped."""
        return self.functions[type(action)](action)

    def _record(self, action: Action, began: float, ended: float) -> None:
        """Note when this rank did an action, or a part of it."""
        stage, number = action.where
        events = self.micro_batches.events
        events.append(Event(action.kind, stage, number or 0, began, ended))
        if not isinstance(action, ON_THIS_RANK):
            self.overlap.add(ended - began)
