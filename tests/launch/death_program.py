"""Run by test_elastic.py: the training program, in which one rank kills itself at some time.

Arguments: when, which rank, and those of the training program.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

WHEN = sys.argv[1] if os.environ["OMPI_COMM_WORLD_RANK"] == sys.argv[2] else "never"


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if WHEN == "starting":
    die()

from mpi4py import MPI  # noqa: E402, F401 - this starts MPI

if WHEN == "in MPI":
    die()

from parallel import Elastic, train  # noqa: E402
from parallel.commands import training  # noqa: E402

PLACES: dict[str, tuple[Any, str]] = {
    "reading the text": (training.text, "load"),
    "making the strategy": (Elastic, "__init__"),
    "reporting": (training.RankReport, "of"),
}
if WHEN in PLACES:
    setattr(*PLACES[WHEN], die)

status = train.COMMAND.main(sys.argv[3:])
if WHEN == "leaving":
    die()
sys.exit(status)
