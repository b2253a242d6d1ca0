"""The calls of a communicator in order: numbers and tags, prepared calls, plans, checked mode.

Each rank has one `Session` for each communicator, which its calls share.
"""

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
from collectives.runtime.messages import Ends
from collectives.runtime.performing import Arguments, make_plan, perform_call
from collectives.runtime.plan import Plan
from collectives.runtime.pool import Key
from collectives.runtime.prepared import Prepared
from collectives.runtime.repeat import MISFIT, one_run
from collectives.runtime.session import Session
from collectives.runtime.work import Steps, Work

__all__ = [
    "MISFIT",
    "Arguments",
    "Checker",
    "Ends",
    "Header",
    "Key",
    "Mode",
    "Plan",
    "Prepared",
    "Session",
    "Steps",
    "Work",
    "add_library",
    "all_gather_integers",
    "broadcast_bytes",
    "broadcast_header",
    "broadcast_integers",
    "fields_with_header",
    "gather_bytes",
    "gather_table",
    "make_plan",
    "one_run",
    "perform_call",
    "place_of_caller",
    "runs_by",
    "send_counts_ahead",
    "subgroup_barrier",
]
