"""Tokens sent once to each host, weights sent to tokens, or whichever is cheaper.

Each dispatcher computes what one rank computes, and sends what it predicts.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator, Topology
from moe import MixtureOfExperts, RoutingLog
from moe.dispatch.hierarchical import Hierarchical
from moe.gates import GATES
from parallel import Mesh, TrafficMismatch, TrafficTable
from parallel.accounts import between_hosts
from parallel.nn import Activations, ArraySpec, Layer, Step
from tests.covering import pairwise
from tests.moe.experts import (
    CLOSE,
    CONTEXT,
    DIM,
    ROWS,
    SIZES,
    STEP_NUMBER,
    Setup,
    alone,
    bytes_of,
    check_all,
    mlp,
    moved,
    spoil_messages,
)
from tests.moe.routing.tables import tables_of

HOSTS = [(1, 1), (2, 2), (2, 1), (3, 3), (3, 1), (4, 2), (4, 1), (8, 2), (8, 4)]


@pytest.mark.parametrize(("name", "hosts", "dtype"), pairwise(GATES, HOSTS, CLOSE))
@pytest.mark.slow
def test_hierarchical_dispatch_is_as_on_one_rank(
    name: str, hosts: tuple[int, int], dtype: str
) -> None:
    """With one host, several, and hosts of one rank; all that is sent and kept is predicted."""
    size, ranks_per_host = hosts
    setup = Setup(name, size=size, num_parts=1 + size % 3, dtype=dtype)
    hierarchical = setup._replace(dispatch="hierarchical", ranks_per_host=ranks_per_host)
    check_all(hierarchical, alone(setup), dtype)


class Tagged(Layer):
    """An expert that notes which tokens it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Any, step: Step) -> tuple[Any, Any]:
        is_token = x[:, 1] == 1  # and not padding
        self.seen += np.rint(100 * x[is_token, 0]).astype(int).tolist()
        return x, None

    def backward_input(self, dy: Any, saved: Any) -> tuple[Any, Any]:
        return dy, None

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return Activations(0, x)


def tags_of(setup: Setup) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(expert, token of the batch) of what experts got, and of what was routed, sorted."""

    def fn(comm: Communicator) -> tuple[list[tuple[int, int]], RoutingLog]:
        mesh, log = Mesh(comm, expert=setup.size), RoutingLog()
        layer, _ = setup.bound(mesh, log, Tagged)
        x, rows = setup.whole("x"), setup.rows()[mesh.rank]
        x[..., 0], x[..., 1] = np.arange(ROWS * CONTEXT).reshape(ROWS, CONTEXT) / 100, 1
        layer.forward(x[rows.start : rows.stop], setup.step(mesh.rank))
        experts = enumerate(layer.experts.layers, layer.experts.first)
        return [(i, token) for i, each in experts for token in each.seen], log  # type: ignore[attr-defined]

    found = collectives.run(fn, size=setup.size)
    tables = [table for _, log in found for _, _, table in tables_of(log, CONTEXT)]
    routed = [(e, token) for token, e, _, dropped in np.concatenate(tables).tolist() if not dropped]
    return sorted(pair for seen, _ in found for pair in seen), sorted(routed)


@pytest.mark.parametrize(("size", "ranks_per_host"), [(3, 1), (4, 2), (8, 4)])
@pytest.mark.parametrize("name", GATES)
def test_no_token_is_lost_or_doubled(name: str, size: int, ranks_per_host: int) -> None:
    """Each expert gets exactly the tokens that one rank routes to it."""
    setup = Setup(name)
    seen, _ = tags_of(hierarchical(setup._replace(size=size), ranks_per_host))
    assert seen == tags_of(setup)[1]
    assert len(set(seen)) == len(seen) > 0


@pytest.mark.parametrize("how", ["lost", "doubled"])
def test_a_row_that_is_lost_or_doubled_is_noticed(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    spoil_messages(monkeypatch, how)
    seen, routed = tags_of(hierarchical(Setup("stable", size=4), 2))
    assert set(routed) - set(seen)
    assert (len(seen) > len(set(seen)) or bool(set(seen) - set(routed))) == (how == "doubled")


@pytest.mark.parametrize(("name", "size", "hidden"), pairwise(GATES, SIZES, [1, 40]))
@pytest.mark.slow
def test_cheaper_dispatch_sends_weights_or_tokens(name: str, size: int, hidden: int) -> None:
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


def test_cheaper_dispatch_changes_from_weights_to_tokens() -> None:
    """By the size of the experts, for the same routing."""
    small, large = (Setup("stable", size=4, hidden=n, dispatch="cheaper") for n in (1, 40))
    assert "weights" in bytes_of(small.run(alone(small).log))
    assert "dispatch" in bytes_of(large.run(alone(large).log))


@pytest.mark.parametrize(("name", "size", "dtype"), pairwise(GATES, SIZES, CLOSE))
@pytest.mark.slow
def test_gathered_weights_are_as_on_one_rank(name: str, size: int, dtype: str) -> None:
    setup = Setup(name, size=size, dtype=dtype)
    found = check_all(setup._replace(dispatch="weights"), alone(setup), dtype)
    if size > 1:
        assert set(bytes_of(found)) == {"weights", "gradients"}


@pytest.mark.parametrize(
    ("name", "dispatch", "size"),
    pairwise(
        ["stable", "expert-choice"],
        ["flat", "padded", "hierarchical", "weights", "cheaper"],
        [2, 4, 8],
    ),
)
def test_experts_drop_the_same_elements_whatever_the_dispatch(
    name: str, dispatch: str, size: int
) -> None:
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
def test_hierarchical_dispatch_sends_fewer_bytes_between_hosts(name: str) -> None:
    """Than flat, where tokens have several experts and rows have 64 numbers.

    The capacity is large enough for second choices.
    """
    has_capacity = name not in ("bias", "sigmoid")
    options = (("capacity_factor", 4.0),) if has_capacity else ()
    flat, once = sent_between_hosts(Setup(name, 8, size=8, dim=64, options=options))
    assert once < flat


def test_hierarchical_dispatch_sends_more_bytes_between_hosts_of_tokens_with_one_expert() -> None:
    flat, once = sent_between_hosts(Setup("switch", 8, size=8, dim=64))
    assert once > flat


def sent_between_hosts(setup: Setup) -> list[int]:
    """The bytes, counted, between 2 hosts of 4 ranks: flat, and by tokens sent once to a host."""
    found = []
    for each in (setup, hierarchical(setup, ranks_per_host=4)):
        table = each.run(alone(each).log)[0].table
        assert table is not None
        table.check()
        found.append(between_hosts(table.matrix, Topology.consecutive(8, 4)))
    return found


Sent = dict[str, Any]  # by phase, the bytes from each rank to each


def bytes_of_token(source: int, experts: list[int], per_host: int | None) -> Sent:
    """What one token of a rank sends; 2 experts are on each of 4 ranks."""
    found: Sent = defaultdict(lambda: np.zeros((4, 4), np.int64))

    def send(phase: str, a: int, b: int, num_bytes: int) -> None:
        found[phase][a, b] += num_bytes * (a != b)

    def send_row(a: int, b: int) -> None:
        """There and back, in forward and in backward."""
        for phase, *ends in (
            ("forward/dispatch", a, b),
            ("forward/combine", b, a),
            ("backward/combine", a, b),
            ("backward/dispatch", b, a),
        ):
            send(phase, *ends, 8 * DIM)

    if per_host is None:
        for expert in experts:
            send_row(source, expert // 2)
        return found
    on_host = {
        source % per_host + rank // per_host * per_host for rank in {e // 2 for e in experts}
    }
    for middle in on_host:
        send_row(source, middle)
        for expert in experts:
            if expert // 2 // per_host == middle // per_host:
                send("forward/entries", source, middle, 8)
                send("forward/weights", source, middle, 8)
                send("backward/weights", middle, source, 8)
                send_row(middle, expert // 2)
    return found


def predicted(table: TrafficTable) -> Sent:
    found: Sent = defaultdict(lambda: np.zeros((4, 4), np.int64))
    for each in table.predicted:
        found[each.phase] += each.matrix[1]
    return found


@pytest.mark.parametrize("per_host", [None, 2])
@pytest.mark.parametrize("name", ["switch", "stable"])
@pytest.mark.slow
def test_moving_one_token_changes_exactly_its_bytes(name: str, per_host: int | None) -> None:
    """To every other expert: in each exchange of forward and backward; then the check fails."""
    setup = Setup(name, 8, size=4)
    if per_host is not None:
        setup = hierarchical(setup, per_host)
    log = alone(setup).log
    routing = log.whole(STEP_NUMBER, "moe")
    first = np.flatnonzero(~routing.is_dropped)[0]
    token, expert = routing.token[first], int(routing.expert[first])
    is_other = (routing.token == token) & ~routing.is_dropped & (routing.expert != expert)
    others, right = routing.expert[is_other].tolist(), setup.run(log)[0].table
    assert token == 0 and right is not None and right.check()
    for distance in range(1, 8):
        target = (expert + distance) % 8
        if target in others:
            continue
        table = setup.run(moved(log, distance))[0].table
        assert table is not None
        before, after = (bytes_of_token(0, [e, *others], per_host) for e in (expert, target))
        found, old = predicted(table), predicted(right)
        for phase in {*found, *old, *before, *after}:
            wanted = old[phase] + after[phase] - before[phase]
            np.testing.assert_array_equal(found[phase], wanted, err_msg=phase)
        if target // 2 == expert // 2:
            assert table.check()
        else:
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


def test_the_hosts_of_the_communicator_count_if_none_are_given() -> None:
    def hosts(comm: Communicator, **options: int) -> int:
        layer = MixtureOfExperts(
            DIM,
            Setup("switch").make_gate(),
            mlp,
            mesh=Mesh(comm, expert=4),
            dispatch="hierarchical",
            **options,
        )
        assert isinstance(layer.dispatcher, Hierarchical)
        return layer.dispatcher.hosts.num

    assert collectives.run(hosts, size=4, topology=Topology("aabb")) == [2] * 4
    assert collectives.run(hosts, size=4) == [1] * 4
    assert collectives.run(partial(hosts, ranks_per_host=1), size=4) == [4] * 4
    with pytest.raises(ValueError, match="neighbouring ranks along expert"):
        collectives.run(hosts, size=4, topology=Topology("abab"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dispatch": "some"}, "dispatch is 'some': it must be one of flat, hierarchical"),
        ({"dispatch": "hierarchical", "ranks_per_host": 0}, "a host has at least 1 rank"),
        ({"dispatch": "hierarchical", "ranks_per_host": 2}, "equally many neighbouring ranks"),
        ({"dispatch": "hierarchical", "ranks_per_host": 3, "padding": "needed"}, "padding none"),
        ({"dispatch": "weights", "padding": "capacity"}, "padding must be none"),
        ({"dispatch": "cheaper", "padding": "capacity"}, "padding must be none"),
    ],
)
def test_dispatchers_that_cannot_work_are_refused(options: dict[str, object], words: str) -> None:
    """On three ranks along expert."""

    def make(comm: Communicator) -> None:
        mesh = Mesh(comm, expert=3)
        MixtureOfExperts(DIM, Setup("switch").make_gate(), mlp, mesh=mesh, **options)

    with pytest.raises(ValueError, match=words):
        collectives.run(make, size=3)
