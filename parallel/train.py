r"""Train a small GPT over bytes by any strategy; compare all bytes sent with the prediction.

    ring launch -n 4 -m parallel.train --strategy zero2 --micro-batches 2
    ring train --strategy serial --json serial.json
    ring train --threads 2 --strategy zero3 --device cuda
    ring launch -n 4 -m parallel.train --strategy ddp --hook powersgd:4
    ring launch -n 8 -m parallel.train --mesh pipe=2,data=2,tensor=2 --zero 1 \
        --schedule zb-v --micro-batches 4 --sequence-parallel
    ring launch -n 4 --fault-tolerant -m parallel.train --strategy elastic

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
from collections.abc import Sequence

from collectives.console import Command
from parallel.commands import add_training_options, train


def read(parse: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Return the options; say where mixtures of experts are trained."""
    if any(word.startswith("--moe") for word in words):
        parse.exit(2, f"{parse.prog}: mixtures of experts are trained by ring moe train\n")
    return parse.parse_args(words)


COMMAND = Command("parallel.train", __doc__, add_training_options, train, read)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
