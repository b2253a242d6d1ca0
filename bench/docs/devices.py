"""Tables of collectives on devices, from what `bench all --device cuda --native` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from bench.case import CALL, NATIVE, NCCL, RIVALS, THROUGH_HOST
from bench.docs.sections import table
from bench.report import FORMS, devices_text
from bench.sizes import text

Row = dict[str, Any]  # a contender at one size
HEADS = ["best of ours", "call", NCCL, THROUGH_HOST, f"MPI ({NATIVE})", "busbw", "of copy"]


def device_table(found: Mapping[str, Any]) -> str:
    """What a job has measured, between lines that say where, and who was left out."""
    cases = groupby(found["rows"], itemgetter("collective", "size"))
    rows = [[collective, text(size), *cells(list(rows))] for (collective, size), rows in cases]
    lines = [f"{title(found)}:", table(["collective", "size"], HEADS, rows), *left_out(found)]
    return "\n\n".join(lines)


def title(found: Mapping[str, Any]) -> str:
    """What was measured, in a line."""
    devices, mps = devices_text(found["devices"]), "with MPS" if found["mps"] else "without MPS"
    how = "" if found["links"] == "peer" else f"; staged all the same: {found['links']}"
    rate = f"a copy on it moves {found['copy_rate'] / 1e9:.0f} GB/s"
    return f"{found['ranks']} ranks on {devices}, {mps}{how}; {rate}"


def left_out(found: Mapping[str, Any]) -> Iterator[str]:
    """A sentence on each contender that was left out, from then on."""
    for name, why in found["left_out"].items():
        yield f"{name} was left out: {why}."


def cells(rows: Sequence[Row]) -> list[str]:
    """Of one case: microseconds, and bus bandwidth and fraction of the copy rate of the best."""
    measured = {row["name"]: row[FORMS[0]] or row[FORMS[1]] for row in rows}
    ours = {name: form for name, form in measured.items() if name not in (CALL, *RIVALS)}
    best = min(ours, key=lambda name: ours[name]["seconds"])
    seconds = [
        measured[name]["seconds"] if name in measured else None
        for name in (CALL, NCCL, THROUGH_HOST, NATIVE)
    ]
    return [
        f"{short(ours[best]['seconds'])} ({best})",
        *("-" if each is None else short(each) for each in seconds),
        f"{ours[best]['busbw']:.1f}",
        f"{ours[best]['of_copy']:.1%}",
    ]


def short(seconds: float) -> str:
    """Microseconds with about three digits."""
    us = seconds * 1e6
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"
