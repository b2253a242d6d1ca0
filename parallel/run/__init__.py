"""Training: a rank does the actions of a step, one after the other, with its arrays.

Users make a `Trainer`; its parts have the functions that do the actions.
"""

from parallel.run.agreement import (
    DIGEST_BYTES,
    REPORT,
    ModelMismatch,
    format_ranks,
    raise_on_all_ranks,
)
from parallel.run.arrays import RankArrays
from parallel.run.scalars import MissingGradient, sum_of_squares
from parallel.run.trainer import Trainer

__all__ = [
    "DIGEST_BYTES",
    "REPORT",
    "MissingGradient",
    "ModelMismatch",
    "RankArrays",
    "Trainer",
    "format_ranks",
    "raise_on_all_ranks",
    "sum_of_squares",
]
