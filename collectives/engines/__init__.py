"""Engines: how the rows of a program run and how messages travel; no collective, no algorithm.

`executor` and `compiled` run programs over MPI; `interpreter` serves threads and operators written
in Python; `staging` serves GPUs.
"""

from collectives.engines.networks import leave_out_networks
from collectives.engines.progress import ProgressThread, shared_progress_thread
from collectives.engines.threads import ThreadTransport, run_threads
from collectives.engines.transport import (
    Action,
    Execution,
    Operands,
    Reusable,
    Transport,
    call_all,
    deadline_in,
    poll_until,
)

__all__ = [
    "Action",
    "Execution",
    "Operands",
    "ProgressThread",
    "Reusable",
    "ThreadTransport",
    "Transport",
    "call_all",
    "deadline_in",
    "leave_out_networks",
    "poll_until",
    "run_threads",
    "shared_progress_thread",
]
