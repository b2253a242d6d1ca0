"""What was routed in a training run, to be compared, counted, and predicted from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from moe.routing import Integers, Routing, digest, joined


class RoutingLog:
    """The routing of each layer in each step.

    A mixture of experts adds what it routes.  The log of a run on one rank has the whole batch, and
    says what any division of that batch over ranks and micro-batches will send
    (`moe.MixtureOfExperts.expected`).

    Attributes
    ----------
    parts : dict
        By step and name of the layer, the routings by the number of their first row in the batch.
    """

    def __init__(self) -> None:
        self.parts: defaultdict[tuple[int, str], dict[int, Routing]] = defaultdict(dict)
        self._whole: dict[tuple[int, str], Routing] = {}

    def add(self, step: int, name: str, first_row: int, routing: Routing) -> None:
        """Add the `routing` of consecutive rows in a `step` by the layer `name`."""
        self.parts[step, name][first_row] = routing
        self._whole.pop((step, name), None)

    def whole(self, step: int, name: str) -> Routing:
        """Return the routing of all rows that were added for this `step` and this `name`.

        Raises KeyError if there are none.
        """
        if (step, name) not in self._whole:
            if (step, name) not in self.parts:
                raise KeyError(f"the log has no routing of layer {name!r} in step {step}")
            parts = self.parts[step, name]
            self._whole[step, name] = joined(parts[row] for row in sorted(parts))
        return self._whole[step, name]

    def tables(self, tokens_per_row: int) -> Iterator[tuple[int, str, Integers]]:
        """Yield the step, the layer, and the table of each part, with tokens numbered in the batch.

        See `Routing.table`.
        """
        for (step, name), parts in sorted(self.parts.items()):
            for row, routing in sorted(parts.items()):
                yield step, name, routing.table(row * tokens_per_row)


def digests(logs: list[RoutingLog], tokens_per_row: int) -> dict[tuple[int, str], str]:
    """Return the SHA-256 of the whole routing in each step by each layer (`moe.routing.digest`).

    `logs` are those of all ranks, which have different rows.
    """
    tables: dict[tuple[int, str], list[Integers]] = {}
    for log in logs:
        for step, name, table in log.tables(tokens_per_row):
            tables.setdefault((step, name), []).append(table)
    return {key: digest(each) for key, each in tables.items()}
