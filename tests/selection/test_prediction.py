"""What is predicted of a call is what the ledger records of it, from each rank to each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator, Topology, algorithms

RANKS = 5
PARTS = [3, 0, 4, 1, 5]
TABLE = [[(3 * src + dst) % 4 for dst in range(RANKS)] for src in range(RANKS)]
CALLS: dict[str, tuple[Any, Any]] = {
    "broadcast": (13, lambda comm, **o: comm.broadcast(np.zeros(13), out=np.zeros(13), **o)),
    "reduce": (13, lambda comm, **o: comm.reduce(np.zeros(13), **o)),
    "all_reduce": (13, lambda comm, **o: comm.all_reduce(np.zeros(13), **o)),
    "all_gather": (
        PARTS,
        lambda comm, **o: comm.all_gather(np.zeros(PARTS[comm.rank]), counts=PARTS, **o),
    ),
    "reduce_scatter": (
        PARTS,
        lambda comm, **o: comm.reduce_scatter(np.zeros(13), counts=PARTS, **o),
    ),
    "all_to_all": (
        TABLE,
        lambda comm, **o: comm.all_to_all(np.zeros(sum(TABLE[comm.rank])), counts=TABLE, **o),
    ),
}
SERVED = [
    (collective, name)
    for collective in CALLS
    for name in algorithms.names(collective)
    if algorithms.info(collective, name).serves(RANKS)
]


SEGMENTED = [names for names in SERVED if "segments" in algorithms.info(*names).options]
HOSTS = Topology("abacb")
KNOW_HOSTS = [names for names in SERVED if "per_host" in algorithms.info(*names).options]


def compare(collective: str, name: str | None, topology: Topology | None = None) -> None:
    counts, call = CALLS[collective]

    def sent(comm: Communicator) -> Any:
        with comm.record() as ledger:
            call(comm, algorithm=name)
        whole = ledger.gather()
        return whole and (whole.matrix(), sum(row.segments for row in whole.rows()))

    recorded, messages = collectives.run(sent, RANKS, topology=topology)[0]
    predicted = collectives.predict(
        collective, RANKS, counts, itemsize=8, algorithm=name, topology=topology
    )
    np.testing.assert_array_equal(predicted.bytes, recorded)
    assert predicted.messages.sum() == messages


@pytest.mark.parametrize(("collective", "name"), SERVED)
def test_predicted_is_recorded(collective: str, name: str) -> None:
    compare(collective, name)


@pytest.mark.parametrize(("collective", "name"), KNOW_HOSTS)
def test_predicted_is_recorded_on_several_hosts(collective: str, name: str) -> None:
    compare(collective, name, HOSTS)
    compare(collective, None, HOSTS)


@pytest.mark.parametrize(("collective", "name"), SEGMENTED)
def test_segments_that_would_be_empty_are_neither_predicted_nor_sent(
    collective: str, name: str
) -> None:
    label, counts = f"{name}(segments=65536)", CALLS[collective][0]
    compare(collective, label)
    n = 8 * int(np.sum(counts)) // (RANKS if collective == "all_to_all" else 1)
    choice = collectives.choose(collective, label, RANKS, n, itemsize=8)
    assert choice.label == label and choice.options["segments"] <= np.sum(counts)
    sent = collectives.predict(collective, RANKS, counts, itemsize=8, algorithm=label).messages
    assert sent.sum() == choice.algorithm.messages(p=RANKS, n=n, **choice.options)


def test_other_hosts_are_another_prediction() -> None:
    call = "all_reduce", RANKS, 13
    for algorithm in ("hierarchical", None):
        one, two = (
            collectives.predict(*call, itemsize=2**20, algorithm=algorithm, topology=hosts).bytes
            for hosts in (HOSTS, None)
        )
        assert (one != two).any()


def test_another_size_is_another_prediction() -> None:
    """The negative control."""
    one, two = (collectives.predict("all_reduce", 4, n, algorithm="ring").bytes for n in (8, 9))
    assert (one != two).any()


def test_an_array_in_place_needs_another_scratch() -> None:
    def scratch(*, in_place: bool) -> int:
        call = "reduce_scatter", 4, (2, 2, 2, 2)
        prediction = collectives.predict(*call, itemsize=8, algorithm="ring", in_place=in_place)
        return sum(prediction.scratch)

    assert scratch(in_place=False) > 0 and scratch(in_place=True) > 0


def test_what_no_call_can_do_is_not_predicted() -> None:
    with pytest.raises(ValueError, match="unknown algorithm"):
        collectives.predict("all_reduce", 3, 8, algorithm="nothing")
    with pytest.raises(ValueError, match="never in place"):
        collectives.predict("all_to_all", 2, [[1, 1], [1, 1]], in_place=True)
