"""Training: the runtime of a list of actions, what it predicts, and how ranks agree."""

from parallel.runtime.agreement import ModelMismatch, raise_on_all_ranks
from parallel.runtime.prediction import RunSize
from parallel.runtime.recipe import BatchFunction, ProgressCallback, Recipe
from parallel.runtime.state import BatchSize
from parallel.runtime.trainer import MissingGradient, Trainer

__all__ = [
    "BatchFunction", "BatchSize", "MissingGradient", "ModelMismatch", "ProgressCallback", "Recipe",
    "RunSize", "Trainer", "raise_on_all_ranks",
]  # fmt: skip
