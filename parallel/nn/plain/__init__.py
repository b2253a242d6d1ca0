"""The layers of a transformer, as one rank computes them without other ranks.

Beside the outputs, what backward needs is rounded to the model's dtype: the normalized vectors of
`LayerNorm` and the probabilities of `Attention`.  An addition to a gradient is rounded before
and after.
"""

from parallel.nn.plain.attention import Attention, CausalAttention
from parallel.nn.plain.cross_entropy import CrossEntropy, loss_of
from parallel.nn.plain.embedding import Embedding
from parallel.nn.plain.gelu import Gelu
from parallel.nn.plain.layer_norm import LayerNorm
from parallel.nn.plain.linear import Linear, Unembedding

__all__ = [
    "Attention",
    "CausalAttention",
    "CrossEntropy",
    "Embedding",
    "Gelu",
    "LayerNorm",
    "Linear",
    "Unembedding",
    "loss_of",
]
