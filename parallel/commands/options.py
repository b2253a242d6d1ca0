"""The options of the commands that train, in groups."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from collectives.console import add_output_options, at_least
from parallel.commands.models import RECOMPUTE
from parallel.commands.presets import HOOKS, OPTIMIZERS, STRATEGIES
from parallel.nn import SEQUENCE_PARALLEL
from parallel.optim import DTYPES
from parallel.options import add_gpt_options, add_shared

Add = Callable[..., object]  # such as `argparse.ArgumentParser.add_argument`
natural, positive = at_least(0), at_least(1)


def add_training_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of every training command to `parse`; more can be added."""
    add_run_options(parse.add_argument)
    add_model_options(parse.add_argument_group("model").add_argument)
    add_update_options(parse.add_argument_group("update").add_argument)
    add_strategy_options(parse.add_argument_group("options of some strategies").add_argument)
    add_file_options(parse.add_argument_group("files").add_argument)
    add_output_options(parse, is_local=False)


def add_run_options(add: Add) -> None:
    """Add the options that say on which ranks and on which batches a run trains."""
    add("--strategy", choices=STRATEGIES, help="a mesh and a sharding; default: ddp")
    texts = {
        "mesh": "such as data=4; or --strategy",
        "schedule": "of the pipeline along the axis pipe; default: 1f1b",
        "attention": "of the ranks along context; default: ring",
    }
    add_shared(add, texts, mesh=None, zero=None, text=None, steps=100, batch=16, micro_batches=1)
    add_shared(add, texts, schedule=None, attention=None)
    add(
        "--sequence-parallel",
        nargs="?",
        const="keep",
        choices=SEQUENCE_PARALLEL[1:],
        help="also divide rows along tensor; keep what is gathered, or gather again",
    )
    add(
        "--ranks-per-host",
        type=positive,
        metavar="N",
        help="hosts of N consecutive ranks; default: as MPI reports them",
    )
    add_shared(add, seed=0, threads=None)
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
    add_shared(add, dtype="float64")
    add("--reduce-dtype", choices=DTYPES, help="in which gradients are summed; default: --dtype")
    add("--optimizer", choices=OPTIMIZERS, default="adam", help="default: %(default)s")
    add_shared(add, lr=2e-3)
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
    add("--no-monitor", action="store_true", help="do not read MPI's own counters")


def rank_and_step(word: str) -> tuple[int, int]:
    """Return rank 2 and step 50 for "2:50"; an argument type."""
    rank, _, step = word.partition(":")
    if not (rank.isdecimal() and step.isdecimal()):
        raise argparse.ArgumentTypeError(f"{word!r} is not RANK:STEP, such as 2:50")
    return int(rank), int(step)
