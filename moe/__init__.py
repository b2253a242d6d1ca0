"""Mixtures of experts whose traffic is predicted from their routing.

Ranks along the axis ``expert`` of a mesh divide the experts, and each token is sent to the ranks of
the experts that its gate chooses.  What is computed does not depend on the number of ranks.

    model = moe_gpt(gate="switch", num_experts=8, mesh=Mesh(comm, data=2, expert=2))

A gate (`moe.gates`) chooses experts for each token, `moe.routing` has its choices as a table,
`moe.ways` bring tokens and experts together, and `moe.layer` is the layer of a model.
`moe.reference` computes the same on one rank by products with masks.
"""

from moe.beside import Beside
from moe.gates import GATES, Gate
from moe.gpt import moe_gpt
from moe.images import swin_moe, v_moe
from moe.layer import MixtureOfExperts, mixtures
from moe.layouts import layout
from moe.log import RoutingLog
from moe.routing import Routing
from moe.students import Teacher, distilled
from moe.ways import Options

__all__ = [
    "GATES", "Beside", "Gate", "MixtureOfExperts", "Options", "Routing", "RoutingLog", "Teacher",
    "distilled", "layout", "mixtures", "moe_gpt", "swin_moe", "v_moe",
]  # fmt: skip
