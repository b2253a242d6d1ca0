"""The tables that ``python -m moe.plan`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from moe.plan.across_hosts import PARTS, HostTraffic
from moe.plan.amounts import Amounts
from moe.plan.one_layer import TITLES, LayerAmounts
from parallel import cli

HEADS = ("logical", "off rank", "off host", "busiest rank", "busiest, off host", "messages")


def print_layer(layer: LayerAmounts, console: Console) -> None:
    """Print a row for each kind of message, their sum, and what sums gradients."""
    table = cli.table_with("phase", "what", numbers=HEADS)
    for kind in layer.kinds:
        table.add_row(kind.phase, kind.about, *numbers(kind.amounts))
    table.add_row("all", "the layer", *numbers(layer.total))
    table.add_row("sums", "gradients of router and experts", *numbers(layer.sums))
    cli.print_table(table, console)


def print_dispatch(
    compared: Mapping[tuple[str, str], LayerAmounts | str], console: Console
) -> None:
    """Print a row for each dispatch and padding, and why others cannot be."""
    table = cli.table_with("dispatch", numbers=(*HEADS, "messages, off host"))
    by_title = {TITLES.get(key, key[0]): layer for key, layer in compared.items()}
    for title, layer in by_title.items():
        if isinstance(layer, LayerAmounts):
            table.add_row(title, *numbers(layer.total), str(layer.total.messages_off_host))
    cli.print_table(table, console)
    print_refused(by_title, console)


def print_layouts(compared: Mapping[str, HostTraffic | str], console: Console) -> None:
    """Print what experts, a pipeline and copies of the model send between hosts."""
    heads = [*(f"{part} bytes" for part in PARTS), "all bytes", "messages"]
    table = cli.table_with("across hosts", "mesh", numbers=heads)
    for name, traffic in compared.items():
        if isinstance(traffic, HostTraffic):
            axes = ",".join(f"{axis}={size}" for axis, size in traffic.axes.items() if size > 1)
            sums = sum(traffic.bytes.values()), sum(traffic.messages.values())
            table.add_row(name, axes, *(str(n) for n in (*traffic.bytes.values(), *sums)))
    cli.print_table(table, console)
    print_refused(compared, console)


def print_refused(compared: Mapping[str, Any], console: Console) -> None:
    """Print why some rows are missing."""
    for name, why in compared.items():
        if isinstance(why, str):
            console.print(f"{name}: not possible here: {why}", markup=False)


def numbers(amounts: Amounts) -> list[str]:
    """Return the numbers of a row."""
    return [str(n) for n in amounts[: len(HEADS)]]
