"""Bytes that another rank sent are never code: nothing is unpickled, headers are checked."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import collectives
from collectives import Communicator
from collectives.arrays.backends import HOST, Arrays
from collectives.errors import CollectiveMismatch
from collectives.runtime import header, performing
from tests.scenarios.jobs import COLLECTIVES, Job, perform, random_rows
from tests.scenarios.sessions import SCENARIOS

QUICK = {"deadline": None, "derandomize": True, "database": None}


def no_pickle(*_: Any, **__: Any) -> Any:
    raise AssertionError("somebody unpickles")


@pytest.fixture
def _no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
        monkeypatch.setattr(pickle, name, no_pickle)


@pytest.mark.usefixtures("_no_pickle")
def test_no_collective_of_arrays_unpickles() -> None:
    def body(comm: Communicator) -> None:
        for collective in COLLECTIVES:
            for is_async in (False, True):
                rows = random_rows(collective, comm.size, 12, is_even=False)
                perform(comm, Job(collective, None, comm.size, rows, is_async=is_async))

    collectives.run(body, 3)


@pytest.mark.usefixtures("_no_pickle")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_no_program_unpickles(scenario: Callable[[Communicator], None]) -> None:
    collectives.run(scenario, 2)


@pytest.mark.usefixtures("_no_pickle")
def test_unpickling_would_be_noticed() -> None:
    with pytest.raises(AssertionError, match="unpickles"):
        pickle.loads(pickle.dumps(1))


def padded(text: bytes, *counts: int) -> np.ndarray:
    """A message that arrives as a header."""
    return np.frombuffer(
        text[: header.NUM_BYTES].ljust(header.NUM_BYTES) + np.array(counts, "<i8").tobytes(),
        np.uint8,
    )


def read(message: np.ndarray) -> header.Header | None:
    """A header that describes plain memory, or None where it is refused."""
    try:
        head = header.decode(message)
    except CollectiveMismatch:
        return None
    assert isinstance(head.kind, str) and isinstance(head.dtype, np.dtype)
    assert not head.dtype.hasobject and head.dtype.itemsize > 0
    assert all(type(n) is int and n >= 0 for n in (*head.shape, *head.counts))
    return head


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
DTYPES = ["<f8", "O", "|O8", "V0", "|S0", "i4,O", "f", "nonsense", "<M8[s]", "({", "(3,)O"]
PARTS = st.tuples(
    st.sampled_from(["numpy", "cupy9", ""]) | JSON,
    st.sampled_from(DTYPES) | JSON,
    st.lists(st.integers(-3, 9) | st.booleans(), max_size=4) | JSON,
)


@settings(max_examples=200, **QUICK)
@given(st.binary(max_size=header.NUM_BYTES) | PARTS.map(json.dumps).map(str.encode))
def test_a_hostile_header_is_refused_and_never_run(text: bytes) -> None:
    read(padded(text))
    read(padded(text, 1, -5, 2**62))


def test_a_good_header_is_read() -> None:
    good = header.Header("numpy", np.dtype("<f8"), (2, 3), (1, 1))
    assert read(header.encode(good)) == good


@pytest.mark.parametrize("dtype", ["O", "|O", "|O8", "|V0", "|S0", "i4,O", "(3,)O", "f8", ["f8"]])
def test_a_header_that_announces_objects_or_nothing_is_refused(dtype: object) -> None:
    assert read(padded(json.dumps(["numpy", dtype, [3]]).encode())) is None


def test_a_header_that_is_none_is_refused_by_the_call() -> None:
    """As if a rank had sent 256 bytes of its own where the others expect a header."""

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            session, message = comm._session, np.full(header.NUM_BYTES, 7, np.uint8)
            arrays = Arrays(HOST, message, message)
            spec = session.spec("broadcast", arrays, message.size, algorithm="binomial")
            session.call(
                lambda work: performing.perform(session, work, spec, arrays, is_ahead=True),
                timeout=None,
            )
        else:
            with pytest.raises(CollectiveMismatch, match="header"):
                comm.broadcast()

    collectives.run(body, 2)
