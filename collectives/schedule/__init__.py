"""Schedules: rounds of sends, receives and copies of named blocks; no bytes, no arrays, no MPI.

What each collective promises, the proof that a schedule keeps it, and the count of what it costs.
"""

from collectives.schedule.contracts import SPECS, Case, Piece, after, before
from collectives.schedule.count import Counts, count, even_sizes
from collectives.schedule.layout import Region, by_pair, by_rank, consecutive, even_counts
from collectives.schedule.rounds import (
    Block,
    Copy,
    CopyReduce,
    Operation,
    Recv,
    RecvReduce,
    Round,
    Schedule,
    ScheduleError,
    Send,
    grid,
    incoming,
    local,
    original,
    outgoing,
)
from collectives.schedule.topology import Topology
from collectives.schedule.transform import (
    RankAlgorithm,
    dual,
    folded,
    idle,
    nested,
    relabelled,
    rooted,
)
from collectives.schedule.trees import Stream, ceil_log2, floor_log2
from collectives.schedule.two_level import among_hosts, within_hosts
from collectives.schedule.verify import verify_schedules

__all__ = [
    "SPECS",
    "Block",
    "Case",
    "Copy",
    "CopyReduce",
    "Counts",
    "Operation",
    "Piece",
    "RankAlgorithm",
    "Recv",
    "RecvReduce",
    "Region",
    "Round",
    "Schedule",
    "ScheduleError",
    "Send",
    "Stream",
    "Topology",
    "after",
    "among_hosts",
    "before",
    "by_pair",
    "by_rank",
    "ceil_log2",
    "consecutive",
    "count",
    "dual",
    "even_counts",
    "even_sizes",
    "floor_log2",
    "folded",
    "grid",
    "idle",
    "incoming",
    "local",
    "nested",
    "original",
    "outgoing",
    "relabelled",
    "rooted",
    "verify_schedules",
    "within_hosts",
]
