"""Tensor parallelism: layers whose matrices ranks divide, and what the ranks send each other.

`region` describes what ranks have around such matrices; the other files have the layers.
"""

from parallel.nn.tensor.dropout import Dropout
from parallel.nn.tensor.linear import Columns, Rows
from parallel.nn.tensor.region import Divided, Whole, gathered
from parallel.nn.tensor.vocabulary import VocabularyCrossEntropy, VocabularyEmbedding

__all__ = [
    "Columns",
    "Divided",
    "Dropout",
    "Rows",
    "VocabularyCrossEntropy",
    "VocabularyEmbedding",
    "Whole",
    "gathered",
]
