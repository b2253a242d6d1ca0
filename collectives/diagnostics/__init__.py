"""What was sent, and where ranks stand: the ledger, the flight recorder, MPI's own counters.

Nothing here knows what a call is; whoever sends says so.
"""

from collectives.diagnostics.flight_recorder import (
    COMPLETE,
    FAILED,
    CallLog,
    FlightRecorder,
    Position,
    Waiting,
)
from collectives.diagnostics.ledger import Ancestry, Ledger, Recorder, Sent, finish, phase
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
    "finish",
    "phase",
]
