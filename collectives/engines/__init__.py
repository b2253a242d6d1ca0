"""Engines: how the rows of a program run and how messages travel; no collective, no algorithm.

`executor` and `compiled` run programs over MPI; `interpreter` serves threads and operators written
in Python; `staging` sends the data of GPUs through memory that MPI takes.
"""

from collectives.engines.board import (
    FAILS,
    GAVE_UP,
    HEADER,
    MESSAGES,
    RANK_DIED,
    RUN_FAILED,
    WORKS,
    Board,
    Box,
    CallKey,
    Failure,
    KernelWord,
)
from collectives.engines.host_memory import BUFFER as BUFFER_RECORD
from collectives.engines.host_memory import NUM_BOXES, NUM_SLOTS, HostMemory
from collectives.engines.networks import leave_out_networks
from collectives.engines.progress import ProgressThread, shared_progress_thread
from collectives.engines.staging import MessageBuffers, PageLockedMemory, Staged
from collectives.engines.threads import ThreadTransport, run_threads
from collectives.engines.transport import (
    Action,
    Enqueued,
    Execution,
    MessageMemory,
    Messages,
    Operands,
    PendingCall,
    Reusable,
    Transport,
    call_all,
    deadline_in,
    poll_until,
    wrong_length,
)

__all__ = [
    "BUFFER_RECORD",
    "FAILS",
    "GAVE_UP",
    "HEADER",
    "MESSAGES",
    "NUM_BOXES",
    "NUM_SLOTS",
    "RANK_DIED",
    "RUN_FAILED",
    "WORKS",
    "Action",
    "Board",
    "Box",
    "CallKey",
    "Enqueued",
    "Execution",
    "Failure",
    "HostMemory",
    "KernelWord",
    "MessageBuffers",
    "MessageMemory",
    "Messages",
    "Operands",
    "PageLockedMemory",
    "PendingCall",
    "ProgressThread",
    "Reusable",
    "Staged",
    "ThreadTransport",
    "Transport",
    "call_all",
    "deadline_in",
    "leave_out_networks",
    "poll_until",
    "run_threads",
    "shared_progress_thread",
    "wrong_length",
]
