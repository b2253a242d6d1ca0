"""Tokens sent once to each host, weights sent to tokens, or whichever is cheaper.

Each way computes what one rank computes, and sends what it plans.
"""

from __future__ import annotations

import numpy as np
import pytest

import collectives
from collectives import Communicator
from moe import MixtureOfExperts
from moe.gates import GATES
from parallel import Mesh, TrafficMismatch
from parallel.accounts import between_hosts
from tests.moe.experts import (
    CLOSE,
    DIM,
    SIZES,
    Setup,
    alone,
    bytes_of,
    check_all,
    mlp,
    moved,
)

HOSTS = [(1, 1), (2, 2), (2, 1), (3, 3), (3, 1), (4, 2), (4, 1), (8, 2), (8, 4)]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("size", "ranks_per_host"), HOSTS)
@pytest.mark.parametrize("name", GATES)
def test_hierarchical_is_as_on_one_rank(
    name: str, size: int, ranks_per_host: int, dtype: str
) -> None:
    """With one host, several, and hosts of one rank; all that is sent and kept is predicted."""
    setup = Setup(name, size=size, num_parts=1 + size % 3, dtype=dtype)
    hierarchical = setup._replace(dispatch="hierarchical", ranks_per_host=ranks_per_host)
    check_all(hierarchical, alone(setup), dtype)


@pytest.mark.parametrize("hidden", [1, 40])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GATES)
def test_cheaper_sends_weights_or_tokens(name: str, size: int, hidden: int) -> None:
    """Whichever are fewer bytes, and one number for each rank to decide."""
    setup = Setup(name, size=size, hidden=hidden)
    found = check_all(setup._replace(dispatch="cheaper"), alone(setup))
    if size > 1:
        tokens, weights = (
            bytes_of(setup._replace(dispatch=way).run(alone(setup).log))
            for way in ("flat", "weights")
        )
        wanted = min((tokens, weights), key=lambda sent: sum(sent.values()) - sent.get("counts", 0))
        assert {k: n for k, n in bytes_of(found).items() if k != "choice"} == wanted


def test_cheaper_changes_from_one_to_the_other() -> None:
    """By the size of the experts, for the same routing."""
    small, large = (Setup("stable", size=4, hidden=n, dispatch="cheaper") for n in (1, 40))
    assert "weights" in bytes_of(small.run(alone(small).log))
    assert "dispatch" in bytes_of(large.run(alone(large).log))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GATES)
def test_gathered_weights_are_as_on_one_rank(name: str, size: int, dtype: str) -> None:
    setup = Setup(name, size=size, dtype=dtype)
    found = check_all(setup._replace(dispatch="weights"), alone(setup), dtype)
    if size > 1:
        assert set(bytes_of(found)) == {"weights", "gradients"}


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dispatch", ["flat", "padded", "hierarchical", "weights", "cheaper"])
@pytest.mark.parametrize("name", ["stable", "expert-choice"])
def test_experts_drop_the_same(name: str, dispatch: str, size: int) -> None:
    """Dropout inside experts goes by the tokens, whose numbers are sent with them."""
    setup = Setup(name, size=size, num_parts=2, dropout=0.4)
    one = alone(setup)
    if dispatch == "padded":
        setup = setup._replace(padding="capacity")
    elif dispatch == "hierarchical":
        setup = hierarchical(setup, 2)
    else:
        setup = setup._replace(dispatch=dispatch)
    sent = bytes_of(check_all(setup, one))
    assert ("numbers" in sent) == ("dispatch" in sent)
    assert np.abs(one.y - alone(setup._replace(padding="none", dropout=0.0)).y).max() > 0.1


def hierarchical(setup: Setup, ranks_per_host: int) -> Setup:
    return setup._replace(dispatch="hierarchical", ranks_per_host=ranks_per_host)


@pytest.mark.parametrize("name", ["gshard", "v-moe", "stable", "bias", "sigmoid", "expert-choice"])
def test_hierarchical_sends_fewer_bytes_between_hosts(name: str) -> None:
    """Than flat, where tokens have several experts and rows have 64 numbers; with k = 1, more.

    Counted: 8 ranks on 2 hosts; the capacity is large enough for second choices.
    """
    has_capacity = name not in ("bias", "sigmoid")
    options = (("capacity_factor", 4.0),) if has_capacity else ()
    setup = Setup(name, 8, size=8, dim=64, options=options)
    found = [
        between_hosts(matrix_of(each), 4) for each in (setup, hierarchical(setup, ranks_per_host=4))
    ]
    assert found[1] < found[0]
    once = Setup("switch", 8, size=8, dim=64)
    assert between_hosts(matrix_of(hierarchical(once, 4)), 4) > between_hosts(matrix_of(once), 4)


def matrix_of(setup: Setup) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The bytes from each rank to each."""
    table = setup.run(alone(setup).log)[0].table
    assert table is not None
    table.check()
    return table.matrix


@pytest.mark.parametrize("distance", [1, 4])
def test_a_prediction_from_another_routing_fails(distance: int) -> None:
    """The negative control: one token is said to go to another rank or another host."""
    setup = hierarchical(Setup("stable", 8, size=8), 4)
    table = setup.run(moved(alone(setup).log, distance))[0].table
    assert table is not None
    with pytest.raises(TrafficMismatch):
        table.check()


@pytest.mark.parametrize(("payload", "close"), [("bfloat16", 0.02), ("int8", 0.02)])
def test_rounded_payloads_may_be_sent_once_to_each_host(payload: str, close: float) -> None:
    """Rows are rounded again within the host: results are close, and bytes predicted."""
    setup = Setup("stable", 8, size=8, payload=payload)
    one = alone(setup)
    found = hierarchical(setup, 4).run(one.log)
    y = np.concatenate([each.y for each in found])
    assert np.abs(y - one.y).max() < close * np.abs(one.y).max()
    assert found[0].table is not None and found[0].table.check()
    for each in found:
        for formula, other in zip(each.formulas, found, strict=True):
            assert (formula.saved, formula.rest) == (other.saved, other.rest)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dispatch": "some"}, "dispatch is 'some': it must be one of flat, hierarchical"),
        ({"dispatch": "hierarchical"}, "needs ranks_per_host, at least 1"),
        ({"dispatch": "hierarchical", "ranks_per_host": 0}, "needs ranks_per_host, at least 1"),
        ({"dispatch": "hierarchical", "ranks_per_host": 2}, "equally many ranks along expert"),
        ({"dispatch": "hierarchical", "ranks_per_host": 3, "padding": "needed"}, "padding none"),
        ({"dispatch": "weights", "padding": "capacity"}, "padding must be none"),
        ({"dispatch": "cheaper", "padding": "capacity"}, "padding must be none"),
    ],
)
def test_what_is_refused(options: dict[str, object], words: str) -> None:
    """On three ranks along expert."""

    def make(comm: Communicator) -> None:
        mesh = Mesh(comm, expert=3)
        MixtureOfExperts(DIM, Setup("switch").make_gate(), mlp, mesh=mesh, **options)

    with pytest.raises(ValueError, match=words):
        collectives.run(make, size=3)
