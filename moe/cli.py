"""What commands share that make models with experts."""

from __future__ import annotations

from collections.abc import Callable

from moe.gates import GATES
from parallel.cli import at_least


def add_expert_options(add: Callable[..., object]) -> None:
    """Add the options that say which experts a model has; `add` is an `add_argument`."""
    positive = at_least(1)
    add("--moe", choices=GATES, metavar="GATE",
        help=f"experts in place of MLPs, chosen by {', '.join(GATES)}")  # fmt: skip
    add("--experts", type=positive, default=8, help="number of experts; default: %(default)s")
    add("--top-k", type=positive, metavar="K", help="experts for each token; default: the gate's")
    add("--moe-every", type=positive, metavar="N",
        help="of N consecutive blocks the last has experts; default: 2")  # fmt: skip
    add(
        "--shared-experts",
        type=at_least(0),
        metavar="N",
        help="MLPs beside the experts; default: 0",
    )
