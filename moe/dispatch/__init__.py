"""Dispatch: how tokens and experts come together, one class for each choice of what is sent.

A dispatcher has two halves, forward and backward, and predicts what they will send.
"""

from moe.dispatch.dispatcher import Dispatcher, ExpectedInput, Prediction
from moe.dispatch.making import DISPATCHERS, make_dispatcher
from moe.dispatch.options import PADDINGS, Options

__all__ = [
    "DISPATCHERS",
    "PADDINGS",
    "Dispatcher",
    "ExpectedInput",
    "Options",
    "Prediction",
    "make_dispatcher",
]
