"""Mixture-of-experts modules on top of `collectives` and `parallel`.

A gate (`moe.gates`) chooses experts for each token, `moe.routing` has its choices as a table,
`moe.dispatch` sends the tokens to the ranks of their experts and back, and `moe.layer` is the layer
of a model.  `moe.reference` computes the same on one rank by products with masks.
"""

from moe.beside import Beside
from moe.gates import GATES, Gate
from moe.gpt import moe_gpt
from moe.layer import MixtureOfExperts
from moe.log import RoutingLog
from moe.routing import Routing

__all__ = ["GATES", "Beside", "Gate", "MixtureOfExperts", "Routing", "RoutingLog", "moe_gpt"]
