"""A training step as a list of actions: what each rank computes, sends, receives and frees.

An action says what it sends, what it keeps, what it needs and how long it takes; `lower` makes the
list of a rank.
"""

from parallel.step.action import SCALAR_ALGORITHM, Action, Clock
from parallel.step.computing import (
    LayerAction,
    LayerBackward,
    LayerBackwardInput,
    LayerBackwardWeight,
    LayerForward,
    Update,
)
from parallel.step.kept import Kept, activations_of, tokens_of
from parallel.step.layer_calls import in_groups, led_by
from parallel.step.lowering import lower
from parallel.step.messages import Receive, Send, StageMessage, WaitForSends
from parallel.step.scalars import FindUnused, SendNorm, SumCounts, SumLoss, SumNorm
from parallel.step.units import Average, Reduce, Reshard, Unshard, WaitForCalls

__all__ = [
    "SCALAR_ALGORITHM",
    "Action",
    "Average",
    "Clock",
    "FindUnused",
    "Kept",
    "LayerAction",
    "LayerBackward",
    "LayerBackwardInput",
    "LayerBackwardWeight",
    "LayerForward",
    "Receive",
    "Reduce",
    "Reshard",
    "Send",
    "SendNorm",
    "StageMessage",
    "SumCounts",
    "SumLoss",
    "SumNorm",
    "Unshard",
    "Update",
    "WaitForCalls",
    "WaitForSends",
    "activations_of",
    "in_groups",
    "led_by",
    "lower",
    "tokens_of",
]
