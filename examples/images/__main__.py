"""Train a small transformer of images with experts; compare all bytes sent with the prediction.

    python -m examples.images --model v --steps 200
    ring launch -n 4 -m examples.images --model swin --mesh data=2,expert=2
    python -m examples.images --threads 4 --mesh pipe=2,expert=2 --micro-batches 4

The images are drawn shapes.  Rank 0 prints the loss, the memory of every rank (by formula, and
counted) and the traffic (predicted, recorded and observed).  The exit status is 1 if columns
differ, and 2 if the arguments do not go together.
"""

from __future__ import annotations

import argparse
import sys

from collectives.console import Command
from examples.images import training
from examples.images.training import Task, model_of
from moe import RoutingLog
from parallel import Mesh


def run(options: argparse.Namespace) -> int:
    """Train as the options say; return the exit status."""
    return training.train(options, task_of)


def task_of(options: argparse.Namespace, mesh: Mesh) -> Task:
    """Return the model of the command line."""
    log = RoutingLog()
    model = model_of(options, options.layers, mesh, log)
    return Task(model, [(model, log)])


COMMAND = Command("examples.images", __doc__, training.add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
