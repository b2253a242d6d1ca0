"""Which part of a model and of a batch each rank of a mesh has: arithmetic without arrays.

`Layout` is what all ranks have in common, and `RankView` is what one rank has.
"""

from parallel.layout.checks import check_arguments
from parallel.layout.layout import BatchSize, Layout
from parallel.layout.recipe import BatchFunction, ProgressCallback, Recipe
from parallel.layout.stages import Message, Stages, divide
from parallel.layout.view import RankView, views_of_parts

__all__ = [
    "BatchFunction",
    "BatchSize",
    "Layout",
    "Message",
    "ProgressCallback",
    "RankView",
    "Recipe",
    "Stages",
    "check_arguments",
    "divide",
    "views_of_parts",
]
