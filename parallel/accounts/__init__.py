"""What a training run keeps and sends: predicted, counted, and compared."""

from parallel.accounts.calls import PredictedCall, Tally, merged
from parallel.accounts.monitor import ObservedTraffic, TrafficMonitor
from parallel.accounts.table import TrafficMismatch, TrafficRow, TrafficTable
from parallel.accounts.timeline import Timeline, gather_json
from parallel.accounts.tracker import CATEGORIES, MemoryTracker

__all__ = [
    "CATEGORIES", "MemoryTracker", "ObservedTraffic", "PredictedCall", "Tally", "Timeline",
    "TrafficMismatch", "TrafficMonitor", "TrafficRow", "TrafficTable", "gather_json", "merged",
]  # fmt: skip
