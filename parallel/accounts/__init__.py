"""What a training run keeps and sends: predicted, counted, and compared."""

from parallel.accounts.calls import PredictedCall, Tally, merged
from parallel.accounts.monitor import Timeline, TrafficMonitor, gather_json
from parallel.accounts.table import TrafficMismatch, TrafficRow, TrafficTable
from parallel.accounts.tracker import CATEGORIES, MemoryTracker

__all__ = [
    "CATEGORIES", "MemoryTracker", "PredictedCall", "Tally", "Timeline", "TrafficMismatch",
    "TrafficMonitor", "TrafficRow", "TrafficTable", "gather_json", "merged",
]  # fmt: skip
