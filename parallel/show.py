"""Print a training step as the list of actions that it is, with what each of them sends.

    python -m parallel.show zero3 --ranks 4 --micro-batches 2

Nothing is sent or computed: the bytes are those that all ranks together would send in one step.
"""

from __future__ import annotations

import argparse
import sys
from inspect import getdoc

from rich.markup import escape

from parallel import cli
from parallel.commands import presets
from parallel.layout import RankView, Recipe
from parallel.nn import gpt
from parallel.optim import DTYPES
from parallel.step import Action, lower

SHOWN = (*presets.SHARDINGS, "server-sync")


def main(arguments: list[str] | None = None) -> int:
    """Print the list that the command line asks for; return the exit status."""
    parse = parser()
    options = parse.parse_args(arguments)

    model = gpt(num_layers=options.layers, hidden=options.hidden, num_heads=1)
    recipe = Recipe(options.dtype, num_micro_batches=options.micro_batches, clip=1.0)
    try:
        layout = presets.layout_of(options.ranks, lambda _: model, recipe, options.strategy, {})
    except ValueError as error:
        parse.exit(2, f"{parse.prog}: {error}\n")
    view = RankView(layout, 0)
    actions = lower(view)
    console = cli.console_of(0)
    table = cli.table_with("action", "phase", "sends", numbers=["messages", "bytes"])
    for action in actions:
        calls = list(action.sends(view))
        sent = [call.sent(options.ranks) for call in calls]
        words = ", ".join(dict.fromkeys(call.collective for call in calls))
        numbers = [sum(call.messages for call in sent), sum(call.bytes for call in sent)]
        cells = [str(n) if n else "" for n in numbers]
        table.add_row(escape(str(action)), action.phase, words, *cells)
    cli.print_table(table, console)
    kinds = dict.fromkeys(map(type, actions))
    console.print("\n".join(map(about, kinds)), markup=False)
    return 0


def about(kind: type[Action]) -> str:
    """Return the code of a kind of action, and the first sentence of its docstring."""
    summary, *_ = (getdoc(kind) or "").partition("\n")
    return f"{kind.code}: {summary}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parse = argparse.ArgumentParser("python -m parallel.show", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    add, positive = parse.add_argument, cli.at_least(1)
    add("strategy", choices=SHOWN)
    add("--ranks", type=positive, default=4, help="default: %(default)s")
    add("--micro-batches", type=positive, default=1, metavar="K", help="default: %(default)s")
    add("--layers", type=cli.at_least(0), default=1, help="blocks; default: %(default)s")
    add("--hidden", type=positive, default=64, help="width; default: %(default)s")
    add("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    return parse


if __name__ == "__main__":
    sys.exit(main())
