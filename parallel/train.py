r"""Train a small GPT over bytes by any strategy; compare all bytes sent with the prediction.

    python -m collectives.launch -n 4 -m parallel.train --strategy zero2 --micro-batches 2
    python -m parallel.train --strategy serial --json serial.json
    python -m parallel.train --threads 2 --strategy zero3 --device cuda
    python -m collectives.launch -n 4 -m parallel.train --strategy ddp --hook powersgd:4
    python -m collectives.launch -n 8 -m parallel.train --mesh pipe=2,data=2,tensor=2 --zero 1 \
        --schedule zb-v --micro-batches 4 --sequence-parallel
    python -m collectives.launch -n 4 --fault-tolerant -m parallel.train --strategy elastic

Rank 0 prints the loss, the memory of every rank (by formula, and counted) and the traffic
(predicted, recorded and observed).  The exit status is 1 if columns differ, and 2 if the arguments
do not go together.  A run is a function of its arguments and the text, bitwise, except for
server-async, whose result depends on the order in which gradients arrive.  If ranks of an elastic
run die, the others continue; no traffic is shown then, because the records of dead ranks are lost.

Under plain mpirun set OMP_NUM_THREADS=1, as the launcher does: otherwise every rank uses as many
threads as there are cores.
"""

from __future__ import annotations

import argparse
import sys

from parallel.commands import train, training_parser


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; return the exit status."""
    parse = parser()
    words = sys.argv[1:] if arguments is None else arguments
    if any(word.startswith("--moe") for word in words):
        parse.exit(2, f"{parse.prog}: mixtures of experts are trained by python -m moe.train\n")
    return train(parse, parse.parse_args(words))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    return training_parser("python -m parallel.train", __doc__)


if __name__ == "__main__":
    sys.exit(main())
