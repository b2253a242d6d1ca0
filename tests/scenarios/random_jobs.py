"""Jobs drawn at random: any algorithm with any options, on any arrays, with any operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

import collectives
from collectives.arrays.operators import operators
from tests.scenarios.jobs import ALGORITHMS, DTYPES, OPS, REDUCTIONS, ROOTED, WHOLE, Job, spelled

ROWS = st.integers(0, 1000)


@st.composite
def jobs(draw: Any, sizes: Sequence[int]) -> Job:
    """A job on one of these numbers of ranks."""
    size, (collective, algorithm) = draw(st.sampled_from(sizes)), draw(st.sampled_from(ALGORITHMS))
    info = collectives.algorithms.info(collective, algorithm)
    # Shards need arrays of another form; tests/algorithms/test_invariant.py has them.
    values = {name: st.integers(2, 6) for name in info.options if name != "shards"}
    options = draw(st.fixed_dictionaries({}, optional=values))
    assume(info.serves(size, **options))
    op = draw(st.sampled_from(operators(collective))) if collective in REDUCTIONS else "sum"
    return Job(
        collective,
        spelled(algorithm, options),
        size,
        draw(_rows(collective, size)),
        dtype=draw(st.sampled_from(OPS[op] if collective in REDUCTIONS else DTYPES)),
        op=op,
        root=draw(st.integers(0, size - 1)) if collective in ROOTED else 0,
        tail=draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)])),
        is_in_place=draw(st.booleans()),
        is_async=draw(st.booleans()),
    )


def _rows(collective: str, size: int) -> st.SearchStrategy[Any]:
    """One number where ranks have the same or the library divides, or one for each rank."""
    own = st.lists(ROWS, min_size=size, max_size=size).map(tuple)
    if collective in ("gather", "all_gather"):
        return own
    return ROWS if collective in WHOLE else ROWS | own
