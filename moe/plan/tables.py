"""The tables that ``ring moe plan`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from collectives.console import Number, Table
from moe.plan.across_hosts import PARTS, HostTraffic
from moe.plan.one_layer import LayerAmounts

HEADS = ("logical", "off rank", "off host", "busiest rank", "busiest, off host", "messages")


def layer_table(layer: LayerAmounts) -> Table:
    """Return a row for each kind of message, their sum, and what sums gradients."""
    table = Table("phase", "what", *map(Number, HEADS))
    for kind in layer.kinds:
        table.add(kind.phase, kind.about, *kind.amounts[: len(HEADS)])
    table.add("all", "the layer", *layer.total[: len(HEADS)])
    table.add("sums", "gradients of router and experts", *layer.sums[: len(HEADS)])
    return table


def dispatch_table(compared: Mapping[str, LayerAmounts | str]) -> Table:
    """Return a row for each dispatch and padding that is possible."""
    table = Table("dispatch", *map(Number, (*HEADS, "messages, off host")))
    for title, layer in compared.items():
        if isinstance(layer, LayerAmounts):
            table.add(title, *layer.total[: len(HEADS)], layer.total.messages_off_host)
    return table


def layout_table(compared: Mapping[str, HostTraffic | str]) -> Table:
    """Return what experts, a pipeline and copies of the model send between hosts."""
    heads = [*(f"{part} bytes" for part in PARTS), "all bytes", "messages"]
    table = Table("across hosts", "mesh", *map(Number, heads))
    for name, traffic in compared.items():
        if isinstance(traffic, HostTraffic):
            axes = ",".join(f"{axis}={size}" for axis, size in traffic.axes.items() if size > 1)
            sums = sum(traffic.bytes.values()), sum(traffic.messages.values())
            table.add(name, axes, *traffic.bytes.values(), *sums)
    return table


def print_refused(compared: Mapping[str, Any], console: Console) -> None:
    """Print why some rows are missing."""
    for name, why in compared.items():
        if isinstance(why, str):
            console.print(f"{name}: not possible here: {why}")
