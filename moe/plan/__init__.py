"""Plans: what layers with experts will send for a routing, and how much of it leaves a host.

Nothing is computed or sent: a model is made for ranks that need not exist, and its layers say what
they would send in a step.  A routing is drawn, read from a log, or made on one rank.
"""

from moe.plan.across_hosts import HostTraffic, compare_layouts
from moe.plan.amounts import Amounts, amounts_of, matrices_of
from moe.plan.one_layer import LayerAmounts, MessageKind, compare_dispatch, layer_amounts
from moe.plan.routings import BatchRouting, from_log, on_text, uniform
from moe.plan.training_step import TrainingStep, layout_of, predict_calls

__all__ = [
    "Amounts",
    "BatchRouting",
    "HostTraffic",
    "LayerAmounts",
    "MessageKind",
    "TrainingStep",
    "amounts_of",
    "compare_dispatch",
    "compare_layouts",
    "from_log",
    "layer_amounts",
    "layout_of",
    "matrices_of",
    "on_text",
    "predict_calls",
    "uniform",
]
