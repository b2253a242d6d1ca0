"""Run by `test_tune.py` on ranks: the tune command on the fake GPU, with its options."""

from __future__ import annotations

import sys

from bench import perf, tune
from bench.__main__ import main
from tests.fake_device import BACKEND
from tests.fake_driver import gpu

if __name__ == "__main__":
    perf.backend = lambda comm, device: {"cuda": BACKEND}[device]
    tune.WARMUP, tune.SAMPLES = 1, 1
    gpu().reset(queue_length=64)
    status = main(["tune", *sys.argv[1:]])
    gpu().check()
    sys.exit(status)
