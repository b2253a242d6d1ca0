"""Models: named layers with flat parameters, a GPT, and models that ranks divide by placements.

`blocks` has the parts of which a transformer consists.
"""

from parallel.nn.models.annotate import annotate
from parallel.nn.models.blocks import (
    SEQUENCE_PARALLEL,
    block,
    dropped,
    feed_forward,
    head,
    region_of,
)
from parallel.nn.models.gpt import ATTENTION, VOCAB_SIZE, gpt
from parallel.nn.models.model import Model, split_flat

__all__ = [
    "ATTENTION",
    "SEQUENCE_PARALLEL",
    "VOCAB_SIZE",
    "Model",
    "annotate",
    "block",
    "dropped",
    "feed_forward",
    "gpt",
    "head",
    "region_of",
    "split_flat",
]
