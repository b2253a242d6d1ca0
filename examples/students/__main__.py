"""Train a small transformer of images that learns from a larger one in a checkpoint.

    python -m examples.images --layers 4 --save teacher
    python -m examples.students --layers 2 --teacher teacher --teacher-layers 4 --stop 60
    ring launch -n 4 -m examples.students --layers 2 --teacher teacher \\
        --teacher-layers 4 --mesh data=2,expert=2

The options and the output are those of `examples.images`.  What the teacher sends is in the
traffic as well, under phases that end in ``loss/teacher`` and the names of its layers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from collectives.console import Command, at_least
from examples.images import training
from examples.students.distillation import distilled, sizes
from examples.students.teacher import Teacher
from moe import RoutingLog
from parallel import Mesh, checkpoint


def run(options: argparse.Namespace) -> int:
    """Train as the options say; return the exit status."""
    return training.train(options, task_of)


def task_of(options: argparse.Namespace, mesh: Mesh) -> training.Task:
    """Return the student of the command line."""
    own_log, its_log = RoutingLog(), RoutingLog()
    student = training.model_of(options, options.layers, mesh, own_log)
    teacher = teacher_of(options, mesh, its_log)
    stop = options.steps if options.stop is None else options.stop
    model = distilled(student, teacher, stop=stop, alpha=options.alpha)
    said = f"{sizes(teacher.model, student)}; on rank 0 {teacher.nbytes} bytes of its teacher"
    return training.Task(model, [(student, own_log), (teacher.model, its_log)], said)


def teacher_of(options: argparse.Namespace, mesh: Mesh, log: RoutingLog) -> Teacher:
    """Return the teacher in the last checkpoint of a folder.

    Raises ValueError, on all ranks, if there is none, or if it is of another model.
    """
    path = checkpoint.latest(options.teacher)
    if path is None:
        raise ValueError(f"there is no checkpoint in {options.teacher}")
    num_layers = options.teacher_layers or options.layers
    model = training.model_of(options, num_layers, mesh, log)
    try:
        parameters = checkpoint.load_parameters(path, model, mesh.comm, options.dtype)
    except checkpoint.LoadFailed as error:
        raise ValueError(
            f"the teacher cannot be loaded as a model of {num_layers} blocks (--teacher-layers)"
            " with the other options of the student (--model, --hidden, --heads, --experts):"
            f" {error}"
        ) from error
    return Teacher(model, parameters)


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    training.add_options(parse)
    natural, positive = at_least(0), at_least(1)
    add = parse.add_argument
    add(
        "--teacher",
        type=Path,
        metavar="DIR",
        required=True,
        help="learn from the model in a checkpoint",
    )
    add("--teacher-layers", type=positive, metavar="N", help="its blocks; default: as --layers")
    add("--stop", type=natural, metavar="STEP", help="learn alone from then on; default: never")
    add("--alpha", type=float, default=1.0, help="weight of imitation; default: %(default)s")


COMMAND = Command("examples.students", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
