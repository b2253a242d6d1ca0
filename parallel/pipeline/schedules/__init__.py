"""The schedules of the literature, by name, with what they cost by formulas.

A schedule is a function of the numbers of ranks and micro-batches; add it to `SCHEDULES`.
"""

from parallel.pipeline.schedules.catalogue import SCHEDULES, make
from parallel.pipeline.schedules.formulas import Formula, ScheduleInfo, round_size

__all__ = ["SCHEDULES", "Formula", "ScheduleInfo", "make", "round_size"]
