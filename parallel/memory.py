"""A table of what each strategy keeps on every rank, for a model of any size.

    ring memory --params 7.5e9 --ranks 64

Parameters, gradients, master copies and optimizer states, by the formulas of
`parallel.optim.formulas`, for rank 0, which keeps no less than any other.  Activations and gathered
units depend on the model and are not in the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from collectives.console import (
    Command,
    Number,
    Table,
    add_output_options,
    console_for,
    in_units,
    write_json,
)
from parallel.mesh import length, span
from parallel.optim import (
    DEVICE_COLUMNS,
    DTYPES,
    SGD,
    Adam,
    Optimizer,
    bytes_moved,
    dtype_of,
    offloaded_bytes,
    state_bytes,
)
from parallel.sharding import Sharding

MOST = 10**18  # parameters, or ranks
SHARDINGS = {"data parallel": Sharding.ddp()} | {
    f"ZeRO-{stage}": Sharding.zero(stage) for stage in (1, 2, 3)
}
OPTIMIZERS: dict[str, type[Optimizer]] = {"adam": Adam, "sgd": SGD}
KEPT = ("parameters", "gradients", "master", "optimizer")


def run(options: argparse.Namespace) -> int:
    """Print the tables that the options ask for; return the exit status."""
    console, tables = console_for(0, options), tables_of(options)
    console.print(
        f"Bytes on each of {options.ranks} ranks: {options.params} parameters in {options.dtype},"
        f" {options.optimizer}"
    )
    for title, table in tables.items():
        console.print(f"{title}:")
        table.print(console)
    write_json({title: table.as_dicts() for title, table in tables.items()}, options.json)
    return 0


def tables_of(options: argparse.Namespace) -> dict[str, Table]:
    """Return the tables by title; all numbers of a table are in one multiple of bytes."""
    kept = {name: on_device(options, sharding) for name, sharding in SHARDINGS.items()}
    offloaded = {
        name: [*on_device(options, sharding, is_offloaded=True)[:-1], *on_host(options, sharding)]
        for name, sharding in SHARDINGS.items()
    }
    return {
        "updates on the device": table_of((*KEPT, "total"), kept),
        "updates in host memory (offload), with what each update moves": table_of(
            (*KEPT, "on host", *DEVICE_COLUMNS), offloaded
        ),
    }


def table_of(heads: Sequence[str], rows: Mapping[str, Sequence[int]]) -> Table:
    """Return a table of bytes without the columns in which all are 0."""
    columns = [i for i in range(len(heads)) if any(row[i] for row in rows.values())]
    unit, multiple = in_units("", "B", [n for row in rows.values() for n in row if n])
    table = Table(f"in {unit.head}", *(Number(heads[i], unit.form) for i in columns))
    for name, row in rows.items():
        table.add(name, *(row[i] / multiple for i in columns))
    return table


def on_device(
    options: argparse.Namespace, sharding: Sharding, *, is_offloaded: bool = False
) -> list[int]:
    """Return the bytes that a rank keeps by category, and in total."""
    psi, dtype = options.params, dtype_of(options.dtype)
    num_states = len(OPTIMIZERS[options.optimizer].STATES)
    part = length(span(psi, options.ranks, 0))
    how: Any = {"sharded": sharding.divided, "num_states": num_states, "is_offloaded": is_offloaded}
    kept = [state_bytes(psi, part, dtype, **how)[category] for category in KEPT]
    return [*kept, sum(kept)]


def on_host(options: argparse.Namespace, sharding: Sharding) -> list[int]:
    """Return the bytes that an offloaded update keeps on the host, and those that it moves."""
    psi, dtype = options.params, dtype_of(options.dtype)
    num_states = len(OPTIMIZERS[options.optimizer].STATES)
    updated = length(span(psi, options.ranks, 0)) if "optimizer" in sharding.divided else psi
    kept = sum(offloaded_bytes(updated, dtype, num_states=num_states).values())
    moved = bytes_moved(updated, dtype, num_states=num_states)
    return [kept, *(moved[column] for column in DEVICE_COLUMNS)]


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parse.add_argument
    add("--params", type=whole_number, required=True, help="number of parameters, such as 7.5e9")
    add("--ranks", type=whole_number, default=1, help="number of ranks; default: %(default)s")
    add("--dtype", choices=DTYPES, default="float16", help="of the model; default: %(default)s")
    add("--optimizer", choices=OPTIMIZERS, default="adam", help="default: %(default)s")
    add_output_options(parse)


def whole_number(word: str) -> int:
    """Return 64 for "64" and 7500000000 for "7.5e9"; an argument type.  At least 1, and exact."""
    try:
        value = Decimal(word)
    except InvalidOperation:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number") from None
    if not value.is_finite() or not 1 <= value <= MOST or value != int(value):
        raise argparse.ArgumentTypeError(f"{word} is not a whole number from 1 to {MOST:.0e}")
    return int(value)


COMMAND = Command("parallel.memory", __doc__, add_options, run)


if __name__ == "__main__":
    sys.exit(COMMAND.main())
