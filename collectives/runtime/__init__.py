"""Calls in order: their numbers and tags, their runs, plans, cached calls, and checked mode.

One `Session` for each rank of each communicator holds what its calls share.
"""

from collectives.runtime.caching import (
    FastPlans,
    cached,
    can_cache,
    make_message_plan,
    make_plan,
)
from collectives.runtime.call_cache import MISFIT
from collectives.runtime.checked import Mode
from collectives.runtime.compiled_support import runs_by
from collectives.runtime.description import told_with_header
from collectives.runtime.header import Header
from collectives.runtime.library_calls import (
    all_gather_integers,
    broadcast_bytes,
    broadcast_header,
    broadcast_integers,
    gather_bytes,
    gather_table,
    meet,
)
from collectives.runtime.plan import Plan
from collectives.runtime.run import Run
from collectives.runtime.run_pool import ends_of
from collectives.runtime.session import Session
from collectives.runtime.turns import Turn
from collectives.runtime.work import Steps, Work

__all__ = [
    "MISFIT",
    "FastPlans",
    "Header",
    "Mode",
    "Plan",
    "Run",
    "Session",
    "Steps",
    "Turn",
    "Work",
    "all_gather_integers",
    "broadcast_bytes",
    "broadcast_header",
    "broadcast_integers",
    "cached",
    "can_cache",
    "ends_of",
    "gather_bytes",
    "gather_table",
    "make_message_plan",
    "make_plan",
    "meet",
    "runs_by",
    "told_with_header",
]
