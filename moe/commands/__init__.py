"""What commands with experts share: their arguments, and a run that generates text.

The programs themselves are `moe.train`, `moe.generate` and `moe.plan`.
"""

from moe.commands.arguments import (
    GATE_OPTIONS,
    LAYER_OPTIONS,
    add_expert_options,
    add_routing_options,
    gate_options,
    layer_options,
)
from moe.commands.generation import Generation

__all__ = [
    "GATE_OPTIONS",
    "LAYER_OPTIONS",
    "Generation",
    "add_expert_options",
    "add_routing_options",
    "gate_options",
    "layer_options",
]
