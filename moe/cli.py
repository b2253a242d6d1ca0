"""What commands share that make models with experts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from moe.gates import GATES, RULES
from moe.payload import PAYLOADS
from moe.ways import PADDINGS, WAYS
from parallel.cli import at_least
from parallel.presets import GATE_OPTIONS, given_options

DROPLESS = "none"  # as a capacity rule
CAPACITY_RULES = (*(name for name in RULES if name != "expert-choice"), DROPLESS)


def add_expert_options(add: Callable[..., object]) -> None:
    """Add the options that say which experts a model has; `add` is an `add_argument`."""
    positive = at_least(1)
    add("--moe", choices=GATES, metavar="GATE",
        help=f"experts in place of MLPs, chosen by {', '.join(GATES)}")  # fmt: skip
    add_number_of_experts(add)
    add("--top-k", type=positive, metavar="K", help="experts for each token; default: the gate's")
    add("--moe-every", type=positive, metavar="N",
        help="of N consecutive blocks the last has experts; default: 2")  # fmt: skip
    add(
        "--shared-experts",
        type=at_least(0),
        metavar="N",
        help="MLPs beside the experts; default: 0",
    )


def add_number_of_experts(add: Callable[..., object]) -> None:
    """Add ``--experts``."""
    add("--experts", type=numbers_of_experts, default=8, metavar="N[,N,...]",
        help="number of experts, or one for each block with experts; default: %(default)s",
    )  # fmt: skip


def numbers_of_experts(word: str) -> int | tuple[int, ...]:
    """Return 8 for "8", and (4, 8) for "4,8"; an argument type."""
    first, *others = (at_least(1)(number) for number in word.split(","))
    return (first, *others) if others else first


def add_capacity_options(add: Callable[..., object]) -> None:
    """Add the options that say how many tokens an expert takes."""
    add("--capacity-factor", type=float, metavar="F", help="default: the gate's")
    add("--capacity-rule", choices=CAPACITY_RULES, metavar="RULE",
        help=f"one of {', '.join(CAPACITY_RULES)}; {DROPLESS}: experts take all tokens; default:"
        " the gate's",
    )  # fmt: skip


def add_dispatch_options(add: Callable[..., object]) -> None:
    """Add the options that say how tokens and experts are brought together."""
    add("--dispatch", choices=WAYS,
        help="send tokens directly to the ranks of their experts, or once to each host, or gather"
        " experts' weights, or whichever of the first and the last sends less; default: flat",
    )  # fmt: skip
    add("--padding", choices=PADDINGS,
        help="rows sent for each expert: those that are routed, as many as its capacity, or as"
        " many as any needs; default: none",
    )  # fmt: skip
    add("--dispatch-parts", type=at_least(1), metavar="N",
        help="send in N parts, and compute one while others are sent; default: 1")  # fmt: skip
    add("--payload", choices=PAYLOADS,
        help="in which vectors are sent; default: same, in --dtype")  # fmt: skip


def gate_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the gate that are on the command line, by their names in `GATES`."""
    found = given_options(options, GATE_OPTIONS)
    return found | ({"rule": None} if found.get("rule") == DROPLESS else {})
