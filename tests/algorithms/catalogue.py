"""Every algorithm with every setting of its options that the tests prove and count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice, product

import pytest

from collectives import algorithms
from collectives.schedule.contracts import SPECS

LARGE = [24, 33, 63, 64]  # where not every number of ranks is tried
SETTINGS = {
    "segments": (1, 2, 5),
    "radix": (2, 3, 4, 8),
    "outstanding": (1, 3),
    "chains": (1, 2, 3),
    "per_host": (1, 3, 8),
    "x": (1, 2, 3, 4),
    "y": (1, 2, 3),
    "aggregation": (1, 3, 16),
    "shards": (1, 5, 8, 13, 40),
}

EVERY = [(c, a) for c in algorithms.collectives() for a in algorithms.names(c)]
each_algorithm = pytest.mark.parametrize(
    ("collective", "name"), EVERY, ids=[".".join(entry) for entry in EVERY]
)


def settings(collective: str, name: str) -> Iterator[dict[str, int]]:
    """All settings of the algorithm's options but the default."""
    options = algorithms.info(collective, name).options
    for values in product(*(SETTINGS[option] for option in options)):
        setting = dict(zip(options, values, strict=True))
        if setting != options:
            yield setting


def cuts_pairs(entry: algorithms.Algorithm) -> bool:
    """Whether it is an all-to-all that cuts each of its blocks, of which there are many."""
    return entry.collective == "all_to_all" and entry.pieces.text != "1"


def cases(
    collective: str, name: str, up_to: int, large: Sequence[int]
) -> Iterator[tuple[int, dict[str, int]]]:
    """(size, options): every size up to `up_to`; with other options up to 16, and two of `large`.

    Settings take turns with the large sizes, as each of these takes as long as all small ones.  If
    all p x p blocks of an all-to-all are cut, only sizes up to 24.
    """
    entry = algorithms.info(collective, name)
    if cuts_pairs(entry):
        up_to, large = min(up_to, 24), [size for size in large if size <= 24]
    for size in range(1, up_to + 1):
        if entry.serves(size):
            yield size, {}
    turns = cycle(large)
    for options in settings(collective, name):
        for size in (*range(1, 17), *islice(turns, 2)):
            if entry.serves(size, **options):
                yield size, options


def roots(collective: str, size: int, all_up_to: int = 16) -> list[int | None]:
    """All roots of small worlds, some of large ones; None where there is no root."""
    if not SPECS[collective].is_rooted:
        return [None]
    return list(range(size)) if size <= all_up_to else [0, 1, size // 2, size - 1]
