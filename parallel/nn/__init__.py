"""Layers with explicit forward and backward passes, and models built of them.

Arrays are NumPy's or CuPy's; each function takes the array namespace of its input.
"""

from parallel.nn.annotate import annotate
from parallel.nn.cache import KeyValues
from parallel.nn.context import RingAttention, UlyssesAttention, context_positions
from parallel.nn.dropout import Dropout
from parallel.nn.functional import Array, cast, namespace_of, new_array, on_host
from parallel.nn.gpt import gpt
from parallel.nn.images import (
    Attention,
    Grid,
    MeanPool,
    MergePatches,
    PatchEmbedding,
    WindowAttention,
)
from parallel.nn.layer import (
    Activations,
    ArraySpec,
    BatchRows,
    Layer,
    LayerTraffic,
    ParameterSpec,
    Residual,
    Sequential,
    Step,
)
from parallel.nn.layers import (
    CausalAttention,
    CrossEntropy,
    Embedding,
    Gelu,
    LayerNorm,
    Linear,
    Unembedding,
)
from parallel.nn.model import Model, split_flat
from parallel.placement import Shape

__all__ = [
    "Activations", "Array", "ArraySpec", "Attention", "BatchRows", "CausalAttention",
    "CrossEntropy", "Dropout", "Embedding", "Gelu", "Grid", "KeyValues", "Layer", "LayerNorm",
    "LayerTraffic", "Linear", "MeanPool", "MergePatches", "Model", "ParameterSpec",
    "PatchEmbedding", "Residual", "RingAttention", "Sequential", "Shape", "Step",
    "UlyssesAttention", "Unembedding", "WindowAttention", "annotate", "cast", "context_positions",
    "gpt", "namespace_of", "new_array", "on_host", "split_flat",
]  # fmt: skip
