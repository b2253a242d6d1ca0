"""Benchmarks and the demo, by the flags of nccl-tests where these have a meaning.

    ring bench all_reduce -g 2 -b 8 -e 64M -f 8 --native
    mpirun -n 2 python -m bench all --algorithm all
    ring bench pingpong -g 2
    ring bench compare before.json after.json
    mpirun -n 2 python -m bench tune
    ring bench demo
    ring bench --import my_algorithms all_reduce --algorithm mine

Every command has --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from bench.calls.options import command_of
from bench.commands.modules import add_import
from bench.workloads.datatypes import ALL
from collectives import algorithms
from collectives.console import Group
from collectives.console.command import Source

SECTIONS: dict[str, dict[str, Source]] = {
    "measure one call": {
        **{name: partial(command_of, name) for name in (*algorithms.collectives(), ALL)},
        "pingpong": "bench.calls.pingpong",
        "checked_mode": "bench.calls.checked_mode",
        "combine": "bench.calls.combine",
    },
    "look at what was measured": {"compare": "bench.results.compare", "plot": "bench.results.plot"},
    "measure the library as a whole": {
        "demo": "bench.demo.command",
        "speed": "bench.speed.command",
        "overlap": "bench.overlap.all_reduce",
        "torch": "bench.torch.backends",
        "torch_traffic": "bench.torch.traffic",
    },
    "measure training": {
        "strategies": "bench.training.strategies",
        "dualpipe": "bench.overlap.dualpipe",
        "moe": "bench.experts.dispatch",
        "balance": "bench.experts.balance",
    },
    "choose algorithms for a machine": {"tune": "bench.choosing.tune"},
}
COMMAND = Group("bench", __doc__, SECTIONS, add_import)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit status."""
    return COMMAND.main(words)


if __name__ == "__main__":
    sys.exit(main())
