"""Run by `test_tune.py` on ranks: the tune command on the fake GPU, with its options."""

from __future__ import annotations

import sys

from bench.__main__ import main
from bench.choosing import algorithms
from bench.commands import world
from tests.fakes.device import BACKEND
from tests.fakes.driver import gpu

if __name__ == "__main__":
    world.backend = lambda comm, device: {"cuda": BACKEND}[device]
    algorithms.WARMUP, algorithms.SAMPLES = 1, 1
    gpu().reset(queue_length=64)
    status = main(["tune", *sys.argv[1:]])
    gpu().check()
    sys.exit(status)
