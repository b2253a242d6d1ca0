r"""Generate text with a small GPT with experts; compare what it reads and sends with predictions.

    ring launch -n 4 -m moe.generate --mesh expert=2,tensor=2 --moe switch \
        --checkpoint FOLDER --prompt "def " --prompt "class " --tokens 32
    ring moe generate --threads 2 --mesh tensor=2 --temperature 0.8 --prompt "import "

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
from collectives.console import Command, add_output_options, at_least, refusing
from moe.commands import Generation, add_expert_options
from parallel.commands import on_ranks, running
from parallel.options import add_gpt_options, add_shared


def run(options: argparse.Namespace) -> int:
    """Generate as the options say; return the exit status."""
    return on_ranks(options, partial(generate, options=options))


def generate(comm: Communicator, options: argparse.Namespace) -> int:
    """Generate on one rank; return the exit status.  Raise Refused before the first token."""
    with refusing():
        generation = Generation(comm, options)
    with running(options):
        return generation.run()


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parse.add_argument
    texts = {"mesh": "of data, expert and tensor; default: data=N for N ranks"}
    add_shared(add, texts, mesh=None, threads=None, dtype="float64", seed=0)
    add("--checkpoint", type=Path, metavar="DIR", help="the last one in DIR; default: no training")
    add("--prompt", action="append", metavar="TEXT", help="may be repeated; default: a newline")
    add(
        "--tokens",
        type=at_least(1),
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
    add("--no-monitor", action="store_true", help="do not read MPI's own counters")
    add_gpt_options(parse.add_argument_group("model").add_argument)
    add_expert_options(parse.add_argument_group("mixtures of experts").add_argument)
    add_output_options(parse, is_local=False)


COMMAND = Command("moe.generate", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
