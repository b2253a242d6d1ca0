"""Diagnostics: the ledger of what was sent, the flight recorder, and the counters of MPI.

Nothing here knows how calls work; the runtime passes their descriptions.
"""

from collectives.diagnostics.flight_recorder import (
    COMPLETE,
    ENQUEUED,
    FAILED,
    CallLog,
    FlightRecorder,
    Position,
    Waiting,
    part_of_report,
    reason_of,
)
from collectives.diagnostics.ledger import (
    Ancestry,
    Entered,
    Ledger,
    Recorder,
    Recording,
    Sent,
    current_phase,
    finish,
    phase,
)
from collectives.diagnostics.mpi_counters import Counters, MonitorUnavailable
from collectives.diagnostics.totals import Totals
from collectives.diagnostics.unseen import ALWAYS, add_unseen, unseen

__all__ = [
    "ALWAYS",
    "COMPLETE",
    "ENQUEUED",
    "FAILED",
    "Ancestry",
    "CallLog",
    "Counters",
    "Entered",
    "FlightRecorder",
    "Ledger",
    "MonitorUnavailable",
    "Position",
    "Recorder",
    "Recording",
    "Sent",
    "Totals",
    "Waiting",
    "add_unseen",
    "current_phase",
    "finish",
    "part_of_report",
    "phase",
    "reason_of",
    "unseen",
]
