"""TODO."""

from collectives.runtime.call_cache import MISFIT, Plans
from collectives.runtime.checked import Mode
from collectives.runtime.header import Header
from collectives.runtime.plan import Plan
from collectives.runtime.run_pool import ends_of
from collectives.runtime.runs import Run
from collectives.runtime.session import Session, Turn
from collectives.runtime.work import Steps, Work

__all__ = [
    "MISFIT",
    "Header",
    "Mode",
    "Plan",
    "Plans",
    "Run",
    "Session",
    "Steps",
    "Turn",
    "Work",
    "ends_of",
]
