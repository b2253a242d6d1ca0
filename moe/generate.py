r"""Generate text with a small GPT with experts; compare what it reads and sends with predictions.

    python -m collectives.launch -n 4 -m moe.generate --mesh expert=2,tensor=2 --moe switch \
        --checkpoint FOLDER --prompt "def " --prompt "class " --tokens 32
    python -m moe.generate --threads 2 --mesh tensor=2 --temperature 0.8 --prompt "import "

The model comes from a checkpoint of `moe.train` with the same options of the model; without a
checkpoint, its weights are random.  Ranks along ``data`` and ``expert`` have different texts.  The
texts do not depend on the mesh.  Experts take all tokens that choose them, whatever their capacity
was.

Rank 0 prints the texts; the latency of a token, from one to the next, of the slowest rank; how many
bytes of weights all ranks read for a token of each text: the weights of the dense layers, and of
the experts that the tokens chose; and the traffic (predicted, recorded and observed).  The exit
status is 1 if columns differ, and 2 if the arguments do not go together.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from collectives import Communicator
from moe.commands import Generation, add_expert_options
from parallel import cli
from parallel.commands import on_ranks, preparing, running
from parallel.optim import DTYPES


def main(arguments: list[str] | None = None) -> int:
    """Generate as the command line says; return the exit status."""
    parse = parser()
    options = parse.parse_args(arguments)
    return on_ranks(parse, options, partial(run, options=options))


def run(comm: Communicator, options: argparse.Namespace) -> int:
    """Generate on one rank; return the exit status.  Raise InvalidRun before the first token."""
    with preparing():
        generation = Generation(comm, options)
    with running(options):
        return generation.run()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parse = argparse.ArgumentParser("python -m moe.generate", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    positive, add = cli.at_least(1), parse.add_argument
    add(
        "--mesh",
        type=cli.mesh_axes,
        metavar="AXIS=N,...",
        help="of data, expert and tensor; default: data=N for N ranks",
    )
    add("--checkpoint", type=Path, metavar="DIR", help="the last one in DIR; default: no training")
    add("--prompt", action="append", metavar="TEXT", help="may be repeated; default: a newline")
    add(
        "--tokens",
        type=positive,
        default=16,
        metavar="N",
        help="bytes to generate after the longest prompt; default: %(default)s",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0: the most likely byte; more: drawn; default: %(default)s",
    )
    add("--seed", type=cli.at_least(0), default=0, help="of what is drawn; default: %(default)s")
    add("--dtype", choices=DTYPES, default="float64", help="to compute in; default: %(default)s")
    add("--threads", type=positive, metavar="N", help="run N ranks as threads, without MPI")
    add("--json", type=Path, metavar="FILE", help="write texts, latencies and traffic to FILE")
    add("--no-monitor", action="store_true", help="do not read MPI's own counters")
    cli.add_gpt_options(parse.add_argument_group("model").add_argument)
    add_expert_options(parse.add_argument_group("mixtures of experts").add_argument)
    return parse


if __name__ == "__main__":
    sys.exit(main())
