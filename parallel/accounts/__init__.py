"""What a training run keeps and sends: predicted, counted, and compared.

Calls and their matrices, MPI's counters by phase, the memory of arrays, and times of ranks.
"""

from parallel.accounts.calls import POINT_TO_POINT, Int64, PredictedCall, Tally, merged
from parallel.accounts.hosts import between_hosts, off_host, renumbered
from parallel.accounts.monitor import PhaseFunction, Timeline, TrafficMonitor, gather_json
from parallel.accounts.rank_times import Event, RankTimes, rank_times
from parallel.accounts.table import TrafficMismatch, TrafficRow, TrafficTable
from parallel.accounts.tracker import CATEGORIES, MemoryTracker, arrays_in, owner_of

__all__ = [
    "CATEGORIES",
    "POINT_TO_POINT",
    "Event",
    "Int64",
    "MemoryTracker",
    "PhaseFunction",
    "PredictedCall",
    "RankTimes",
    "Tally",
    "Timeline",
    "TrafficMismatch",
    "TrafficMonitor",
    "TrafficRow",
    "TrafficTable",
    "arrays_in",
    "between_hosts",
    "gather_json",
    "merged",
    "off_host",
    "owner_of",
    "rank_times",
    "renumbered",
]
