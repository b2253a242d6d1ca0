"""Print a training step as the list of actions that it is, with what each of them sends.

    ring show zero3 --ranks 4 --micro-batches 2

Nothing is sent or computed: the bytes are those that all ranks together would send in one step.
"""

from __future__ import annotations

import argparse
import sys
from inspect import getdoc

from collectives.console import (
    Command,
    Number,
    Table,
    add_output_options,
    at_least,
    console_for,
    refusing,
    write_json,
)
from parallel.commands import presets
from parallel.layout import RankView, Recipe
from parallel.nn import gpt
from parallel.options import add_shared
from parallel.step import Action, lower

SHOWN = (*presets.SHARDINGS, "server-sync")


def run(options: argparse.Namespace) -> int:
    """Print the list that the options ask for; return the exit status."""
    model = gpt(num_layers=options.layers, hidden=options.hidden, num_heads=1)
    recipe = Recipe(options.dtype, num_micro_batches=options.micro_batches, clip=1.0)
    with refusing():
        layout = presets.layout_of(options.ranks, lambda _: model, recipe, options.strategy, {})
    view = RankView(layout, 0)
    actions, console = lower(view), console_for(0, options)
    table = Table("action", "phase", Number("messages"), Number("bytes"), "sends")
    for action in actions:
        calls = list(action.sends(view))
        sent = [call.sent(options.ranks) for call in calls]
        words = ", ".join(dict.fromkeys(call.collective for call in calls))
        messages, nbytes = sum(call.messages for call in sent), sum(call.bytes for call in sent)
        table.add(str(action), action.phase, messages or None, nbytes or None, words)
    table.print(console)
    for kind in dict.fromkeys(map(type, actions)):
        console.print(about(kind))
    write_json(table.as_dicts(), options.json)
    return 0


def about(kind: type[Action]) -> str:
    """Return the code of a kind of action, and the first sentence of its docstring."""
    summary, *_ = (getdoc(kind) or "").partition("\n")
    return f"{kind.code}: {summary}"


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parse.add_argument("strategy", choices=SHOWN)
    add_shared(parse.add_argument, ranks=4, micro_batches=1, hidden=64, dtype="float32")
    parse.add_argument(
        "--layers", type=at_least(0), default=1, help="number of blocks; default: %(default)s"
    )
    add_output_options(parse)


COMMAND = Command("parallel.show", __doc__, add_options, run)


if __name__ == "__main__":
    sys.exit(COMMAND.main())
