"""Diagnostics: the ledger of what was sent, the flight recorder, and the counters of MPI.

Nothing here knows how calls work; the runtime passes their descriptions.
"""

from collectives.diagnostics.flight_recorder import (
    COMPLETE,
    FAILED,
    CallLog,
    FlightRecorder,
    Position,
    Waiting,
)
from collectives.diagnostics.ledger import (
    Ancestry,
    Ledger,
    Recorder,
    Sent,
    current_phase,
    finish,
    in_phase,
    phase,
)
from collectives.diagnostics.mpi_counters import Counters, MonitorUnavailable

__all__ = [
    "COMPLETE",
    "FAILED",
    "Ancestry",
    "CallLog",
    "Counters",
    "FlightRecorder",
    "Ledger",
    "MonitorUnavailable",
    "Position",
    "Recorder",
    "Sent",
    "Waiting",
    "current_phase",
    "finish",
    "in_phase",
    "phase",
]
