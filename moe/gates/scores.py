"""What a gate makes of the router's logits (tokens, experts): scores, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moe.routing import Values
from parallel.nn import Array, namespace_of

TINY = 1e-30
"""Added to sums of scores before dividing by them: all sigmoids of a token may round to 0.

DeepSeek-V3 adds 1e-20.  Sums of sigmoids of logits above -50 do not change in float32.
"""


def score_bytes(width: int) -> int:
    """Return the bytes of a score in a model whose numbers have `width` bytes: at least 4.

    Logits, scores and weights are in float32 also if the model has numbers of two bytes.
    """
    return max(width, 4)


class Scores(NamedTuple):
    """A function of logits (..., experts), and its derivative.

    `backward` is called with the scores and the derivative by them, on any device.
    """

    forward: Callable[[Values], Values]
    backward: Callable[[Array, Array], Array]

    def __repr__(self) -> str:
        return f"Scores({self.forward.__name__})"  # without addresses, which differ between ranks


def softmax(logits: Values) -> Values:
    """Return the softmax over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Values = powers / powers.sum(axis=-1, keepdims=True)
    return result


def softmax_backward(scores: Array, dscores: Array) -> Array:
    """Return the derivative by the logits of `softmax`."""
    along = namespace_of(scores).sum(scores * dscores, axis=-1, keepdims=True)
    return scores * (dscores - along)


def sigmoid(logits: Values) -> Values:
    """Return 1 / (1 + exp(-logits)) of each logit, exact to rounding for negative ones too."""
    power = np.exp(-np.abs(logits))  # at most 1: it cannot overflow
    result: Values = np.where(logits < 0, power, 1) / (1 + power)
    return result


def sigmoid_backward(scores: Array, dscores: Array) -> Array:
    """Return the derivative by the logits of `sigmoid`."""
    return dscores * scores * (1 - scores)


SOFTMAX = Scores(softmax, softmax_backward)
"""The `scores` of a `Gate` that are the softmax of the logits, over the experts."""

SIGMOID = Scores(sigmoid, sigmoid_backward)
"""The `scores` of a `Gate` that are the sigmoid of each logit."""
