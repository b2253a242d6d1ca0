"""The loss of logits: cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parallel.nn.functional import (
    Array,
    cast,
    check_classes,
    flatten_rows,
    namespace_of,
    one_hot,
    upcast,
)
from parallel.nn.layer import Activations, ArraySpec, Layer, Step


class CrossEntropy(Layer):
    """The loss, the last layer of a model that is trained: the mean of -log p(target), in nats.

    Logits (..., classes) become the sum over the targets of this micro-batch, divided by the number
    of targets in the *whole* batch: the losses of all parts of a batch add up to its mean.  The
    derivative is computed during forward, with the loss scale.

    Raises
    ------
    ValueError
        From `forward`, if a target is not a class.
    """

    saves_input = False

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        xp = namespace_of(x)
        flat, targets = upcast(flatten_rows(x)), xp.reshape(step.targets, (-1,))
        check_classes("target", step.on_host(step.targets), flat.shape[-1])
        shifted = flat - xp.max(flat, axis=-1, keepdims=True)
        loss, dlogits = loss_of(shifted, one_hot(targets, flat.shape[-1], flat.dtype), step)
        return loss, cast(dlogits, x.dtype).reshape(x.shape)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        """Return the derivative by the logits; `dy` is a number, 1 if the loss comes last."""
        if dy == 1:
            return namespace_of(saved).positive(saved), None  # a copy
        return cast(upcast(saved) * dy, saved.dtype), None

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return Activations(x.nbytes, x.of_shape())


def loss_of(
    shifted: Array, truth: Array, step: Step, add_up: Callable[[Array], Array] | None = None
) -> tuple[Array, Array]:
    """Return the loss of logits, a number on their device, and the derivative by the logits.

    Parameters
    ----------
    shifted : array
        Logits (targets, classes) less the largest logit of their row.
    truth : array
        A one for the class of every target, of the same shape.
    step : Step
        The training step, which has the number of targets and the loss scale.
    add_up : function, optional
        Called with two sums over the classes that this rank has, (2, targets): the exponentials,
        and the logit of the target.  It returns the sums over all classes.
    """
    xp = namespace_of(shifted)
    powers, own = xp.exp(shifted), xp.where(truth == 1, shifted, xp.zeros_like(shifted))
    both = xp.stack([xp.sum(powers, axis=-1), xp.sum(own, axis=-1)])
    sums, logits = both if add_up is None else add_up(both)
    loss = xp.sum(xp.log(sums) - logits).astype(np.float64) / step.total
    return loss, (powers / sums[:, None] - truth) * (step.loss_scale / step.total)
