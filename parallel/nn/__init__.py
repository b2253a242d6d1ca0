"""Layers with explicit forward and backward passes, and models built of them.

Arrays are NumPy's or CuPy's; every function takes the array namespace of its input.
"""

from parallel.mesh import Shape
from parallel.nn.context import RingAttention, UlyssesAttention, context_positions
from parallel.nn.functional import (
    Array,
    cast,
    check_classes,
    flatten_rows,
    matmul,
    mix64,
    namespace_of,
    new_array,
    on_host,
    scales_for,
    softmax,
    upcast,
)
from parallel.nn.layer import (
    Activations,
    ArraySpec,
    BatchRows,
    KeyValues,
    Layer,
    LayerTraffic,
    ParameterSpec,
    Recompute,
    Residual,
    Sequential,
    Step,
    by_layer,
    token_numbers,
)
from parallel.nn.models import (
    ATTENTION,
    SEQUENCE_PARALLEL,
    VOCAB_SIZE,
    Model,
    annotate,
    block,
    dropped,
    feed_forward,
    gpt,
    head,
    region_of,
    split_flat,
)
from parallel.nn.plain import (
    Attention,
    CausalAttention,
    CrossEntropy,
    Embedding,
    Gelu,
    LayerNorm,
    Linear,
    Unembedding,
)
from parallel.nn.tensor import Dropout

__all__ = [
    "ATTENTION", "SEQUENCE_PARALLEL", "VOCAB_SIZE", "Activations", "Array", "ArraySpec",
    "Attention", "BatchRows", "CausalAttention", "CrossEntropy", "Dropout", "Embedding", "Gelu",
    "KeyValues", "Layer", "LayerNorm", "LayerTraffic", "Linear", "Model", "ParameterSpec",
    "Recompute", "Residual", "RingAttention", "Sequential", "Shape", "Step", "UlyssesAttention",
    "Unembedding", "annotate", "block", "by_layer", "cast", "check_classes", "context_positions",
    "dropped", "feed_forward", "flatten_rows", "gpt", "head", "matmul", "mix64", "namespace_of",
    "new_array", "on_host", "region_of", "scales_for", "softmax", "split_flat", "token_numbers",
    "upcast",
]  # fmt: skip
