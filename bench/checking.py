"""The measurement behind `bench check`: plans and calls with every kind of checking."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import collectives
from bench.check import MODES
from bench.timing import SMALL, Effort, times

SECONDS = 20.0  # after which fewer samples must do


def measured(num_bytes: int, options: argparse.Namespace) -> list[float]:
    """Seconds of the plan in each mode, and then of the call."""
    comms = [collectives.world(check=check) for check in MODES.values()]  # type: ignore[arg-type]
    x = np.zeros(max(1, num_bytes // options.dtype.itemsize), options.dtype)
    y = np.empty_like(x)
    plans = [comm.plan.all_reduce(x, out=y) for comm in comms]
    calls: list[Callable[[], Any]] = [partial(comm.all_reduce, x, out=y) for comm in comms]
    effort = Effort(options.warmup, options.samples, SECONDS)
    runs = [*(plan.run for plan in plans), *calls]
    found = times(runs, x, is_small=x.nbytes <= SMALL, effort=effort)
    for plan in plans:
        plan.free()
    return found
