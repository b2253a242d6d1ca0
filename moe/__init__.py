"""Mixtures of experts whose traffic is predicted from their routing.

Ranks along the axis ``expert`` of a mesh divide the experts, and each token is sent to the ranks of
the experts that its gate chooses.  What is computed does not depend on the number of ranks.

    model = moe_gpt(gate="switch", num_experts=8, mesh=Mesh(comm, data=2, expert=2))

The folders are in the order in which a reader needs them: `routing` is a table of choices, which
the `gates` make; an `exchange` moves rows as a table says, by which `dispatch` brings tokens and
experts together; `layers` and `models` compute with them, and `plan` says what they will send.
"""

from moe.dispatch import Options
from moe.gates import GATES, Gate
from moe.layers import MixtureOfExperts, SumOfLayers, mixtures
from moe.models import gates_of_blocks, layout, moe_gpt
from moe.routing import Routing, RoutingLog

__all__ = [
    "GATES",
    "Gate",
    "MixtureOfExperts",
    "Options",
    "Routing",
    "RoutingLog",
    "SumOfLayers",
    "gates_of_blocks",
    "layout",
    "mixtures",
    "moe_gpt",
]
