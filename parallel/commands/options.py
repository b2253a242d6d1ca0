"""The options of the commands that train, in groups."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from parallel.cli import add_gpt_options, at_least, mesh_axes
from parallel.commands.models import RECOMPUTE
from parallel.commands.presets import HOOKS, OPTIMIZERS, STRATEGIES
from parallel.nn import ATTENTION, SEQUENCE_PARALLEL
from parallel.optim import DTYPES
from parallel.pipeline import SCHEDULES

Add = Callable[..., object]  # such as `argparse.ArgumentParser.add_argument`
natural, positive = at_least(0), at_least(1)


def training_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every training command; more can be added.

    `prog` is the command, such as ``"python -m parallel.train"``, and `description` the text of its
    help.
    """
    parse = argparse.ArgumentParser(prog, description=description)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    add_run_options(parse.add_argument)
    add_model_options(parse.add_argument_group("model").add_argument)
    add_update_options(parse.add_argument_group("update").add_argument)
    add_strategy_options(parse.add_argument_group("options of some strategies").add_argument)
    add_file_options(parse.add_argument_group("files").add_argument)
    return parse


def add_run_options(add: Add) -> None:
    """Add the options that say on which ranks and on which batches a run trains."""
    add("--strategy", choices=STRATEGIES, help="a mesh and a sharding; default: ddp")
    add("--mesh", type=mesh_axes, metavar="AXIS=N,...", help="such as data=4; or --strategy")
    add("--zero", type=int, choices=range(4), help="stage of ZeRO on the mesh; 0: sum gradients")
    add("--text", metavar="PATH", help="file or directory; default: Python's standard library")
    add("--steps", type=positive, default=100, help="default: %(default)s")
    add("--batch", type=positive, default=16, help="rows of all ranks; default: %(default)s")
    add(
        "--micro-batches",
        type=positive,
        default=1,
        metavar="K",
        help="parts in which a rank computes its rows; default: %(default)s",
    )
    add("--schedule", choices=SCHEDULES, help="of the pipeline along the axis pipe; default: 1f1b")
    add(
        "--sequence-parallel",
        nargs="?",
        const="keep",
        choices=SEQUENCE_PARALLEL[1:],
        help="also divide rows along tensor; keep what is gathered, or gather again",
    )
    add("--attention", choices=ATTENTION, help="of the ranks along context; default: ring")
    add(
        "--ranks-per-host",
        type=positive,
        metavar="N",
        help="hosts of N consecutive ranks; default: as MPI reports them",
    )
    add("--seed", type=natural, default=0, help="default: %(default)s")
    add("--threads", type=positive, metavar="N", help="run N ranks as threads, without MPI")
    add(
        "--progress",
        choices=("auto", "thread", "none"),
        default="auto",
        help="whether calls continue in a thread; auto: if each rank has a free core",
    )


def add_model_options(add: Add) -> None:
    """Add the options of a dense GPT."""
    add_gpt_options(add)
    add(
        "--dropout",
        type=float,
        default=0.0,
        metavar="RATE",
        help="behind attention and MLP; default: none",
    )
    add(
        "--recompute",
        nargs="?",
        const="all",
        default="none",
        choices=RECOMPUTE,
        help="keep only the inputs of all blocks, or of attention; default: none",
    )


def add_update_options(add: Add) -> None:
    """Add the options that say how parameters are kept and updated."""
    add(
        "--dtype",
        choices=DTYPES,
        default="float64",
        help="of parameters, gradients and messages; default: %(default)s",
    )
    add("--reduce-dtype", choices=DTYPES, help="in which gradients are summed; default: --dtype")
    add("--optimizer", choices=OPTIMIZERS, default="adam", help="default: %(default)s")
    add("--lr", type=float, default=2e-3, help="default: %(default)s")
    add("--clip", type=float, metavar="NORM", help="largest norm of the whole gradient")
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the model is; cuda needs CuPy; default: %(default)s",
    )
    add("--offload", metavar="PLACE", help="update in host memory (host) or on disk (disk:FOLDER)")
    add("--offload-activations", metavar="PLACE", help="move activations there until backward")


def add_strategy_options(add: Add) -> None:
    """Add the options that only some strategies take."""
    add("--algorithm", metavar="NAME", help="of collectives; default: ring, or linear for server-*")
    add("--bucket-bytes", type=positive, help="ddp, elastic: gradients summed together")
    add("--hook", metavar="NAME", help=f"ddp: how gradients are summed: {', '.join(HOOKS)}")
    add(
        "--keep-after-forward",
        action="store_true",
        default=None,
        help="zero3, hsdp: free parameters after backward only",
    )
    add("--group-size", type=positive, help="hsdp, zeropp: number of ranks in a group")
    add(
        "--every",
        type=positive,
        metavar="STEPS",
        help="local-updates: steps that ranks make alone; default: 10",
    )
    add("--outer-lr", type=float, help="local-updates: of the common model; default: 0.7")
    add("--outer-momentum", type=float, help="local-updates: of the common model; default: 0.9")
    add("--gradient-bits", type=int, choices=(4, 8), help="zeropp: of an element of a gradient")
    add("--staleness-bound", type=natural, help="server-async: steps ahead of the slowest worker")
    add(
        "--kill",
        type=rank_and_step,
        metavar="RANK:STEP",
        help="elastic: this rank kills its process (-9) in the middle of this step",
    )


def add_file_options(add: Add) -> None:
    """Add the options for files to read and to write, and for MPI's counters."""
    add("--save", type=Path, metavar="DIR", help="save a checkpoint in DIR at the end")
    add("--save-every", type=positive, metavar="STEPS", help="also save one every STEPS steps")
    add("--resume", type=Path, metavar="DIR", help="continue from the last checkpoint in DIR")
    add("--trace", type=Path, metavar="FILE", help="write a timeline for chrome://tracing")
    add("--json", type=Path, metavar="FILE", help="write losses, memory and traffic to FILE")
    add("--no-monitor", action="store_true", help="do not read MPI's own counters")


def rank_and_step(word: str) -> tuple[int, int]:
    """Return rank 2 and step 50 for "2:50"; an argument type."""
    rank, _, step = word.partition(":")
    if not (rank.isdecimal() and step.isdecimal()):
        raise argparse.ArgumentTypeError(f"{word!r} is not RANK:STEP, such as 2:50")
    return int(rank), int(step)
