"""Collective communication, accountable to the byte: all commands in one.

    ring launch -n 4 example.py
    ring bench all_reduce -g 2 --native
    ring train --threads 4 --mesh data=4 --zero 2 --steps 20

Every command explains its options with --help.  A command is a module as
well: a job runs `ring train` on its ranks by `ring launch -n 4 -m
parallel.train`, and without the script `ring` there is `python -m
collectives`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from collectives.console import Group, add_completion

SECTIONS = {
    "run a program": {
        "launch": "collectives.launch",
        "doctor": "collectives.doctor",
        "flight": "collectives.flight",
        "warm": "collectives.warm",
    },
    "measure": {"bench": "bench"},
    "train, and predict what training sends and keeps": {
        "train": "parallel.train",
        "show": "parallel.show",
        "pipeline": "parallel.pipeline",
        "memory": "parallel.memory",
        "plan": "parallel.plan",
    },
    "mixtures of experts": {
        "moe train": "moe.train",
        "moe plan": "moe.plan",
        "moe generate": "moe.generate",
    },
    "simulate a network, and write files for other simulators": {
        "simulate": "collectives.simulate",
        "simulate step": "parallel.simulate",
        "export": "collectives.export",
        "export step": "parallel.export",
    },
}
COMMAND = Group("collectives", __doc__, SECTIONS, add_completion)


def main(words: Sequence[str] | None = None) -> int:
    """Run `ring`; return the exit status."""
    return COMMAND.main(words, "ring")


if __name__ == "__main__":
    sys.exit(main())
