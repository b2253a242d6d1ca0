"""The routing of whole batches as tables, which are the same however a batch is divided."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from moe.routing import Integers, RoutingLog


def tables_of(log: RoutingLog, tokens_per_row: int) -> Iterator[tuple[int, str, Integers]]:
    """The step, the layer, and the table of each part, with tokens numbered in the batch."""
    for (step, name), parts in sorted(log.parts.items()):
        for row, routing in sorted(parts.items()):
            yield step, name, routing.table(row * tokens_per_row)


def digest(tables: Iterable[Integers]) -> str:
    """The SHA-256 of tables of a batch (`Routing.table`), in any order, as hexadecimal."""
    rows = np.concatenate([np.empty((0, 4), np.int64), *tables])
    rows = rows[np.lexsort(rows.T[::-1])]
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()


def digests(logs: list[RoutingLog], tokens_per_row: int) -> dict[tuple[int, str], str]:
    """The digest of the whole routing in each step by each layer; ranks have different rows."""
    tables: dict[tuple[int, str], list[Integers]] = {}
    for log in logs:
        for step, name, table in tables_of(log, tokens_per_row):
            tables.setdefault((step, name), []).append(table)
    return {key: digest(parts) for key, parts in tables.items()}
