"""What layers with experts will send for a routing, and how much of it leaves a host.

Nothing is computed or sent: a model is made for ranks that do not exist, and a trainer says what
its layers would send in a step.  `routings` are drawn, read from a log, or made on one rank.
"""

from moe.plan.amounts import Sent, matrices_of, sent
from moe.plan.hosts import Across, across_hosts
from moe.plan.job import Job, predicted
from moe.plan.layer import Kind, OfLayer, of_layer, of_ways
from moe.plan.routings import from_log, on_text, uniform

__all__ = [
    "Across", "Job", "Kind", "OfLayer", "Sent", "across_hosts", "from_log", "matrices_of",
    "of_layer", "of_ways", "on_text", "predicted", "sent", "uniform",
]  # fmt: skip
