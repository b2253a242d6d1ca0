"""What a training run will send, keep and take, read off the actions of its ranks.

Nothing is allocated, computed or sent: a `Layout` and the views of its ranks say it all.
"""

from parallel.predict.memory import StepMemory
from parallel.predict.picture import step_picture
from parallel.predict.tasks import step_tasks
from parallel.predict.time import Prices, Span, StepTime, simulate_step
from parallel.predict.traffic import RunSize, start_traffic, step_traffic, with_checks

__all__ = [
    "Prices",
    "RunSize",
    "Span",
    "StepMemory",
    "StepTime",
    "simulate_step",
    "start_traffic",
    "step_picture",
    "step_tasks",
    "step_traffic",
    "with_checks",
]
