"""Tensor parallelism: ranks divide the matrices of a layer, and what they send each other.

`region` says what ranks have around such matrices, `linear` and `vocabulary` have the layers.
"""

from parallel.nn.tensor.linear import Columns, Rows
from parallel.nn.tensor.region import Divided, Whole
from parallel.nn.tensor.vocabulary import VocabularyCrossEntropy, VocabularyEmbedding

__all__ = [
    "Columns", "Divided", "Rows", "VocabularyCrossEntropy", "VocabularyEmbedding", "Whole",
]  # fmt: skip
