"""Pipeline schedules as data: made, proved, simulated and drawn; nothing is computed or sent.

`make` returns lists of what each rank computes, `with_messages` adds what ranks send each other,
`validate` proves that lists compute each stage once and wait for nothing forever, and `simulate`
says when.  A `Trainer` runs the same lists.
"""

from parallel.pipeline.messages import with_messages
from parallel.pipeline.schedule import Schedule, computations
from parallel.pipeline.schedules import SCHEDULES, Formula, ScheduleInfo, make
from parallel.pipeline.simulation import Simulation, simulate
from parallel.pipeline.text import parse, read_csv, write_csv
from parallel.pipeline.times import Times
from parallel.pipeline.validation import InvalidSchedule, validate

__all__ = [
    "SCHEDULES",
    "Formula",
    "InvalidSchedule",
    "Schedule",
    "ScheduleInfo",
    "Simulation",
    "Times",
    "computations",
    "make",
    "parse",
    "read_csv",
    "simulate",
    "validate",
    "with_messages",
    "write_csv",
]
