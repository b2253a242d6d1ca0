"""Tables of collectives on devices, from what `bench all --device cuda --native` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from bench.contenders.contender import CALL, NATIVE, NCCL, RIVALS, THROUGH_HOST
from bench.results.measurement import FORMS, devices_text
from bench.workloads.sizes import text
from docs.generate.sections import table

Row = dict[str, Any]  # a contender at one size
HEADS = ["best of ours", "call", NCCL, THROUGH_HOST, f"MPI ({NATIVE})", "busbw", "of copy"]


def device_table(job: Mapping[str, Any]) -> str:
    """Return what a job has measured, between lines that say where, and who was left out."""
    cases = groupby(job["rows"], itemgetter("collective", "size"))
    rows = [[collective, text(size), *cells(list(rows))] for (collective, size), rows in cases]
    lines = [f"{title(job)}:", table(["collective", "size"], HEADS, rows), *left_out(job)]
    return "\n\n".join(lines)


def title(job: Mapping[str, Any]) -> str:
    """Return what was measured, in a line."""
    devices, mps = devices_text(job["devices"]), "with MPS" if job["mps"] else "without MPS"
    how = "" if job["links"] == "peer" else f"; staged all the same: {job['links']}"
    rate = f"a copy on it moves {job['copy_rate'] / 1e9:.0f} GB/s"
    return f"{job['ranks']} ranks on {devices}, {mps}{how}; {rate}"


def left_out(job: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence on each contender that was left out, from then on."""
    for name, why in job["left_out"].items():
        yield f"{name} was left out: {why}."


def cells(rows: Sequence[Row]) -> list[str]:
    """Return microseconds of a case; of the best, bus bandwidth and fraction of the copy rate."""
    measured = {row["name"]: row[FORMS[0]] or row[FORMS[1]] for row in rows}
    ours = {name: form for name, form in measured.items() if name not in (CALL, *RIVALS)}
    best = min(ours, key=lambda name: ours[name]["seconds"])
    seconds = [
        measured[name]["seconds"] if name in measured else None
        for name in (CALL, NCCL, THROUGH_HOST, NATIVE)
    ]
    return [
        f"{short(ours[best]['seconds'])} ({best})",
        *("-" if value is None else short(value) for value in seconds),
        f"{ours[best]['busbw']:.1f}",
        f"{ours[best]['of_copy']:.1%}",
    ]


def short(seconds: float) -> str:
    """Return microseconds with about three digits."""
    us = seconds * 1e6
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"
