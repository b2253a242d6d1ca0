"""Models with experts: a GPT, meshes for it, and what its experts read to generate text.

The GPT is that of `parallel.nn`, with experts in place of some feed-forward layers.
"""

from moe.models.gpt import gate_by_name, gates_of_blocks, moe_gpt
from moe.models.inference import bytes_read, count_reads, without_capacity
from moe.models.meshes import LAYOUTS, layout

__all__ = [
    "LAYOUTS",
    "bytes_read",
    "count_reads",
    "gate_by_name",
    "gates_of_blocks",
    "layout",
    "moe_gpt",
    "without_capacity",
]
