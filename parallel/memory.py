"""A table of what each strategy keeps on every rank, for a model of any size.

    python -m parallel.memory --params 7.5e9 --ranks 64

Parameters, gradients, master copies and optimizer states in GB (10^9 bytes), by the formulas of
`parallel.optim.formulas`, for rank 0, which keeps no less than any other.  Activations and gathered
units depend on the model and are not in the table.
"""

from __future__ import annotations

import argparse
import math
import sys
from decimal import Decimal, InvalidOperation
from typing import Any

from parallel.cli import console_of, print_table, table_with
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


def main(arguments: list[str] | None = None) -> int:
    """Print the table that the command line asks for; return the exit status."""
    options = parser().parse_args(arguments)
    console = console_of(0)
    console.print(
        f"GB per rank of {options.ranks}: {options.params} parameters in {options.dtype},"
        f" {options.optimizer}"
    )
    table = table_with("strategy", numbers=[*KEPT, "total", "on host", *DEVICE_COLUMNS])
    for is_offloaded in (False, True):
        for name, sharding in SHARDINGS.items():
            numbers = row(options, sharding.divided, is_offloaded)
            table.add_row(name + ", offload" * is_offloaded, *map(gigabytes, numbers))
    print_table(table, console)
    console.print("offload: updates are made in host memory; to host, to device: by each update")
    return 0


def row(options: argparse.Namespace, sharded: frozenset[str], is_offloaded: bool) -> list[int]:
    """Return the bytes kept by category, in total and on the host, and moved by an update."""
    psi, dtype = options.params, dtype_of(options.dtype)
    num_states = len(OPTIMIZERS[options.optimizer].STATES)
    part = length(span(psi, options.ranks, 0))
    how: Any = {"sharded": sharded, "num_states": num_states, "is_offloaded": is_offloaded}
    kept = [state_bytes(psi, part, dtype, **how)[category] for category in KEPT]
    updated = part if "optimizer" in sharded else psi
    on_host = sum(offloaded_bytes(updated, dtype, num_states=num_states).values())
    moved = bytes_moved(updated, dtype, num_states=num_states)
    if_offloaded = [on_host, *(moved[column] for column in DEVICE_COLUMNS)]
    return [*kept, sum(kept), *(n * is_offloaded for n in if_offloaded)]


def gigabytes(nbytes: int) -> str:
    """Return a number of bytes in units of 10^9, with three significant digits."""
    if nbytes == 0:
        return "0"
    digits = 2 - math.floor(math.log10(nbytes / 1e9))
    return f"{nbytes / 1e9:.{max(digits, 0)}f}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parse = argparse.ArgumentParser("python -m parallel.memory", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parse.add_argument
    add("--params", type=whole_number, required=True, help="number of parameters, such as 7.5e9")
    add("--ranks", type=whole_number, default=1, help="number of ranks; default: %(default)s")
    add("--dtype", choices=DTYPES, default="float16", help="of the model; default: %(default)s")
    add("--optimizer", choices=OPTIMIZERS, default="adam", help="default: %(default)s")
    return parse


def whole_number(word: str) -> int:
    """Return 64 for "64" and 7500000000 for "7.5e9"; an argument type.  At least 1, and exact."""
    try:
        value = Decimal(word)
    except InvalidOperation:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number") from None
    if not value.is_finite() or not 1 <= value <= MOST or value != int(value):
        raise argparse.ArgumentTypeError(f"{word} is not a whole number from 1 to {MOST:.0e}")
    return int(value)


if __name__ == "__main__":
    sys.exit(main())
