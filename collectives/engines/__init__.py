"""Engines: how the rows of a program are run and how messages travel; no collective, no algorithm.

`executor` and `compiled` run over MPI, `interpreter` for threads and operators in Python, `staging`
for GPUs.
"""

from collectives.engines.progress import ProgressThread, the_thread
from collectives.engines.threads import InprocTransport, run_threads
from collectives.engines.transport import (
    Action,
    Execution,
    Operands,
    Reusable,
    Transport,
    deadline_in,
    do,
)

__all__ = [
    "Action",
    "Execution",
    "InprocTransport",
    "Operands",
    "ProgressThread",
    "Reusable",
    "Transport",
    "deadline_in",
    "do",
    "run_threads",
    "the_thread",
]
