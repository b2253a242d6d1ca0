"""The arguments of command lines that make models with experts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from collectives.console import at_least
from moe.dispatch import DISPATCHERS, PADDINGS
from moe.exchange import PAYLOADS
from moe.gates import GATES, RULES

# Options that need --moe, by what `moe.GATES` and `moe_gpt` call them.
GATE_OPTIONS = {"top_k": "k", "capacity_factor": "capacity_factor", "capacity_rule": "rule"}
LAYER_OPTIONS = {
    "moe_every": "every",
    "shared_experts": "num_shared",
    "padding": "padding",
    "dispatch_parts": "num_parts",
    "payload": "payload",
    "dispatch": "dispatch",
    "expert_dropout": "expert_dropout",
    "rows_per_group": "rows_per_group",
}
DROPLESS = "none"  # as a capacity rule
CAPACITY_RULES = (*(name for name in RULES if name != "expert-choice"), DROPLESS)


def add_expert_options(add: Callable[..., object], gate: str | None = None) -> None:
    """Add the options that say which experts a model has.

    `add` is an `add_argument`, and `gate` the default of ``--moe``.
    """
    positive, default = at_least(1), "" if gate is None else f"; default: {gate}"
    add(
        "--moe",
        choices=GATES,
        default=gate,
        metavar="GATE",
        help=f"experts in place of MLPs, chosen by {', '.join(GATES)}{default}",
    )
    add(
        "--experts",
        type=numbers_of_experts,
        default=8,
        metavar="N[,N,...]",
        help="number of experts, or one for each block with experts; default: %(default)s",
    )
    add("--top-k", type=positive, metavar="K", help="experts for each token; default: the gate's")
    add(
        "--moe-every",
        type=positive,
        metavar="N",
        help="of N consecutive blocks the last has experts; default: 2",
    )
    add(
        "--shared-experts",
        type=at_least(0),
        metavar="N",
        help="MLPs beside the experts; default: 0",
    )


def numbers_of_experts(word: str) -> int | tuple[int, ...]:
    """Return 8 for "8", and (4, 8) for "4,8"; an argument type."""
    first, *others = (at_least(1)(number) for number in word.split(","))
    return (first, *others) if others else first


def add_routing_options(add: Callable[..., object]) -> None:
    """Add the options that say how tokens are routed and brought to experts."""
    positive = at_least(1)
    add("--capacity-factor", type=float, metavar="F", help="default: the gate's")
    add(
        "--capacity-rule",
        choices=CAPACITY_RULES,
        metavar="RULE",
        help=f"one of {', '.join(CAPACITY_RULES)}; {DROPLESS}: experts take all tokens; default:"
        " the gate's",
    )
    add(
        "--rows-per-group",
        type=positive,
        metavar="N",
        help="rows of the batch that are routed together; default: 1",
    )
    add(
        "--dispatch",
        choices=DISPATCHERS,
        help="send tokens directly to the ranks of their experts, or once to each host, or gather"
        " experts' weights, or whichever of the first and the last sends less; default: flat",
    )
    add(
        "--padding",
        choices=PADDINGS,
        help="rows sent for each expert: those that are routed, as many as its capacity, or as"
        " many as any needs; default: none",
    )
    add(
        "--dispatch-parts",
        type=positive,
        metavar="N",
        help="send in N parts, and compute one while others are sent; default: 1",
    )
    add("--payload", choices=PAYLOADS, help="in which vectors are sent; default: same, in --dtype")


def gate_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the gate that are on the command line, by their names in `GATES`."""
    given = given_options(options, GATE_OPTIONS)
    return given | ({"rule": None} if given.get("rule") == DROPLESS else {})


def layer_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of layers that are on the command line, by their names in `moe_gpt`."""
    return given_options(options, LAYER_OPTIONS)


def given_options(options: argparse.Namespace, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that are on the command line, by the names to which `names` maps theirs.

    A 0 is one of them: what takes the option says whether 0 is allowed.
    """
    values = {name: getattr(options, key, None) for key, name in names.items()}
    return {name: value for name, value in values.items() if value is not None}
