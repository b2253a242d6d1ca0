"""What a training run keeps and sends: predicted, counted, and compared."""

from parallel.accounts.calls import PredictedCall, Tally, merged
from parallel.accounts.hosts import between_hosts, off_host, renumbered
from parallel.accounts.monitor import Timeline, TrafficMonitor, gather_json
from parallel.accounts.pipeline import Event, RankTimes, rank_times
from parallel.accounts.table import TrafficMismatch, TrafficRow, TrafficTable
from parallel.accounts.tracker import CATEGORIES, MemoryTracker

__all__ = [
    "CATEGORIES", "Event", "MemoryTracker", "PredictedCall", "RankTimes", "Tally", "Timeline",
    "TrafficMismatch", "TrafficMonitor", "TrafficRow", "TrafficTable", "between_hosts",
    "gather_json", "merged", "off_host", "rank_times", "renumbered",
]  # fmt: skip
