"""The calls of a communicator in order: numbers and tags, runs, plans, cached calls, checked mode.

Each rank has one `Session` for each communicator, which its calls share.
"""

from collectives.runtime.cached_on_device import cached_on_device, can_cache_on_device
from collectives.runtime.caching import FastPlans, cached, can_cache, make_message_plan, make_plan
from collectives.runtime.call_cache import MISFIT
from collectives.runtime.checked import Checker, Mode
from collectives.runtime.compiled_support import runs_by
from collectives.runtime.description import add_library, fields_with_header, place_of_caller
from collectives.runtime.header import Header
from collectives.runtime.library_calls import (
    all_gather_integers,
    broadcast_bytes,
    broadcast_header,
    broadcast_integers,
    gather_bytes,
    gather_table,
    send_counts_ahead,
    subgroup_barrier,
)
from collectives.runtime.numbering import CallId
from collectives.runtime.plan import Plan
from collectives.runtime.run import Run
from collectives.runtime.run_pool import ends_of
from collectives.runtime.session import Session
from collectives.runtime.work import Steps, Work

__all__ = [
    "MISFIT",
    "CallId",
    "Checker",
    "FastPlans",
    "Header",
    "Mode",
    "Plan",
    "Run",
    "Session",
    "Steps",
    "Work",
    "add_library",
    "all_gather_integers",
    "broadcast_bytes",
    "broadcast_header",
    "broadcast_integers",
    "cached",
    "cached_on_device",
    "can_cache",
    "can_cache_on_device",
    "ends_of",
    "fields_with_header",
    "gather_bytes",
    "gather_table",
    "make_message_plan",
    "make_plan",
    "place_of_caller",
    "runs_by",
    "send_counts_ahead",
    "subgroup_barrier",
]
