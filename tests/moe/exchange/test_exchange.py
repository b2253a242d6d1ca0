"""Dispatch: every token reaches its experts once and comes back, and what is sent is predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator
from moe.exchange import parts, rows_to_ranks, start_loads
from moe.exchange.buffers import Received, Rows, SendBuffer, combined, slopes
from moe.exchange.exchange import Exchange
from moe.exchange.loads import Division, experts_of
from moe.gates import GATES, Gate
from moe.routing import Routing, joined
from moe.sums.sums import Sums, add_up, kernel_of
from parallel import PredictedCall, TrafficMismatch, TrafficTable
from parallel.nn import Step
from tests.covering import pairwise
from tests.moe.exchange.reference import masks, mixture
from tests.moe.experts import spoil_messages

TOKENS, DIM = 6, 3  # tokens of a group
GROUPS = [3, 0, 2, 1, 4, 1, 0, 2]  # of each rank
SIZES = [1, 2, 3, 4, 8]
FORMS = ["dropless", "padded"]


def gate_of(name: str, num_experts: int) -> Gate:
    if name == "v-moe":  # drops none
        return GATES[name](num_experts, k=min(2, num_experts), capacity_factor=4.0)
    if name == "expert-choice":
        return GATES[name](num_experts, capacity_factor=4.0)
    return GATES[name](num_experts)


def route(gate: Gate, groups: int, seed: int) -> tuple[Routing, Any]:
    """Routing and weights; rank `seed` has this many groups."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((groups * TOKENS, gate.num_experts))
    ids = rng.integers(0, 256, groups * TOKENS)  # for hash routing
    gated = gate.forward(logits, num_groups=groups, token_ids=ids)
    return gated.routing, gated.weights


def matrix(expert: int) -> Any:
    return np.random.default_rng([9, expert]).standard_normal((DIM, DIM))


def tags(rank: int, groups: int) -> Any:
    """Rows that no other token has: (rank, token, 1)."""
    tokens = np.arange(groups * TOKENS)
    return np.stack([np.full_like(tokens, rank), tokens, np.ones_like(tokens)], axis=1) * 1.0


class Found(NamedTuple):
    y: Any
    seen: list[tuple[int, int, int]]  # (expert, rank, token) of the rows that experts got
    table: TrafficTable | None


def parts_of(
    form: str, routing: Routing, gate: Gate, groups: list[int], comm: Communicator, num_parts: int
) -> list[parts.Part]:
    if form == "dropless":
        loads = start_loads(routing.load, comm)()
        return parts.dropless(routing, loads, comm.rank, num_parts)
    return parts.padded(routing, capacity_of(gate), groups, comm.rank, num_parts)


def capacity_of(gate: Gate) -> int:
    """Of a group; without a rule, all tokens of a group may choose one expert."""
    capacity = gate.capacity(TOKENS)
    return TOKENS if capacity is None else capacity


def on_ranks(name: str, num_experts: int, size: int, form: str, num_parts: int) -> list[Found]:
    gate, groups = gate_of(name, num_experts), GROUPS[:size]
    routings = [route(gate, n, rank) for rank, n in enumerate(groups)]

    def fn(comm: Communicator) -> Found:
        routing, weights = routings[comm.rank]
        x = tags(comm.rank, groups[comm.rank])
        owned = experts_of(num_experts, size, comm.rank)
        seen: list[tuple[int, int, int]] = []

        def compute(rows: Received, out: Rows, part: parts.Part) -> None:
            assert rows.joined().shape == (sum(part.received), DIM)
            for i, expert in enumerate(range(owned.start, owned.stop)):
                each = rows.of_expert(part, i)
                out.set_of_expert(part, i, each @ matrix(expert))
                seen.extend((expert, int(a), int(b)) for a, b, _ in each[each[:, 2] == 1])

        with comm.record() as ledger:
            with collectives.phase("counts"):
                mine = parts_of(form, routing, gate, groups, comm, num_parts)
            y, _ = Exchange(comm).forward(x, weights, mine, Step(), compute)
        record = ledger.gather()
        if record is None:
            return Found(y, seen, None)
        calls = predicted([each for each, _ in routings], gate, groups, form)
        return Found(y, seen, TrafficTable(calls, record, None, size=size))

    found: list[Found] = collectives.run(fn, size=size)
    return found


def predicted(
    routings: list[Routing], gate: Gate, groups: list[int], form: str
) -> list[PredictedCall]:
    """What one dispatch and its way back send, from the routing of all ranks."""
    size, num_experts = len(groups), gate.num_experts
    loads = [routing.load for routing in routings]
    if form == "padded":
        loads = [np.full(num_experts, n * capacity_of(gate)) for n in groups]
    owned = collectives.even_counts(num_experts, size)
    calls = [PredictedCall("counts", "all_to_all", "linear", [owned] * size, 8)]
    rows = rows_to_ranks(np.stack(loads), size)
    calls += [
        PredictedCall(phase, "all_to_all", "linear", (DIM * table).tolist(), 8)
        for phase, table in (("dispatch", rows), ("combine", rows.T))
    ]
    return calls[form == "padded" :]


def wanted(name: str, num_experts: int, size: int) -> list[Any]:
    """The output of each rank, by the masks of GShard on one rank."""
    gate, groups = gate_of(name, num_experts), GROUPS[:size]
    routings = [route(gate, n, rank) for rank, n in enumerate(groups)]
    whole = joined(routing for routing, _ in routings)
    x = np.concatenate([tags(rank, n) for rank, n in enumerate(groups)])
    both = masks(whole, np.concatenate([weights for _, weights in routings]), capacity_of(gate))
    y = mixture(x, both, lambda expert, rows: rows @ matrix(expert))
    return np.split(y, np.cumsum([n * TOKENS for n in groups])[:-1])


def sent_to_experts(name: str, num_experts: int, size: int) -> list[tuple[int, int, int]]:
    """(expert, rank, token) of all that is not dropped, sorted."""
    gate, found = gate_of(name, num_experts), []
    for rank, n in enumerate(GROUPS[:size]):
        routing, _ = route(gate, n, rank)
        kept = ~routing.is_dropped
        both = zip(routing.expert[kept].tolist(), routing.token[kept].tolist(), strict=True)
        found += [(expert, rank, token) for expert, token in both]
    return sorted(found)


def seen_in(found: list[Found]) -> list[tuple[int, int, int]]:
    """The same of what experts got."""
    return sorted(each for rank in found for each in rank.seen)


@pytest.mark.parametrize(
    ("name", "num_experts", "size", "form", "num_parts"),
    pairwise(GATES, [2, 3, 8, 13], SIZES, FORMS, [1, 2, 3]),
)
def test_the_result_is_that_of_masks_on_one_rank(
    name: str, num_experts: int, size: int, form: str, num_parts: int
) -> None:
    """More and fewer experts than ranks; ranks without tokens, and without experts; in parts."""
    found = on_ranks(name, num_experts, size, form, num_parts)
    for each, y in zip(found, wanted(name, num_experts, size), strict=True):
        np.testing.assert_allclose(each.y, y, rtol=0, atol=1e-12)
    assert seen_in(found) == sent_to_experts(name, num_experts, size)  # none lost or doubled
    if num_parts == 1:
        assert found[0].table is not None and found[0].table.check()


@pytest.mark.parametrize("spoil", ["lost", "doubled"])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_is_lost_or_doubled_is_noticed(
    form: str, spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    name, num_experts, size = "stable", 8, 4
    wanted = sent_to_experts(name, num_experts, size)
    assert seen_in(on_ranks(name, num_experts, size, form, 1)) == wanted
    spoil_messages(monkeypatch, spoil)
    seen = seen_in(on_ranks(name, num_experts, size, form, 1))
    assert set(wanted) - set(seen)
    assert (len(seen) > len(set(seen)) or bool(set(seen) - set(wanted))) == (spoil == "doubled")


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_parts"),
    [(8, 2, 1), (8, 2, 4), (8, 2, 3), (5, 2, 2), (8, 2, 5), (8, 4, 3), (3, 4, 2)],
)
def test_parts_have_whole_experts_if_each_rank_has_enough(
    num_experts: int, num_ranks: int, num_parts: int
) -> None:
    """Each row is in one part, and the parts of an expert follow each other."""
    load = np.random.default_rng(3).integers(0, 20, (num_ranks, num_experts))
    stop = np.zeros_like(load)
    for i in range(num_parts):
        size, first = Division(num_experts, num_ranks, num_parts, i).of(load)
        if num_parts <= num_experts // num_ranks:
            assert set(np.unique(size[:, size.any(axis=0)] == load[:, size.any(axis=0)])) <= {True}
            owned = [experts_of(num_experts, num_ranks, r) for r in range(num_ranks)]
            assert all(size[:, experts].any() for experts in owned)
        else:
            assert (first == stop).all()
        stop += size
    np.testing.assert_array_equal(stop, load)


def test_parts_send_the_same_bytes_together() -> None:
    """In more messages."""
    for form in FORMS:
        whole, divided = (on_ranks("gshard", 8, 4, form, n)[0].table for n in (1, 3))
        assert whole is not None and divided is not None
        np.testing.assert_array_equal(whole.matrix, divided.matrix)


@pytest.mark.parametrize("form", FORMS)
def test_one_token_that_goes_to_another_rank_changes_exactly_its_bytes(form: str) -> None:
    """The negative control: and the check fails.  Padded messages do not depend on the routing."""
    size, num_experts = 4, 8
    gate, groups = gate_of("switch", num_experts), GROUPS[:size]
    routings = [route(gate, n, rank)[0] for rank, n in enumerate(groups)]
    moved = list(routings)
    first = np.flatnonzero(~routings[0].is_dropped & (routings[0].expert < 6))[0]
    expert, target = routings[0].expert.copy(), 6 + (routings[0].expert[first] == 6)
    before, expert[first] = expert[first] // 2, target
    moved[0] = replace(routings[0], expert=expert)
    both = [
        sum(call.matrices(size)[1] for call in predicted(each, gate, groups, form))
        for each in (routings, moved)
    ]
    change = np.zeros((size, size), int)
    row = 8 * DIM
    for rank, sign in ((before, -1), (3, 1)):
        if rank != 0:
            change[0, rank] += sign * row
            change[rank, 0] += sign * row
    np.testing.assert_array_equal(both[1] - both[0], change * (form == "dropless"))
    if form == "dropless":
        found = on_ranks("switch", num_experts, size, form, 1)[0].table
        assert found is not None and found.check()
        found.predicted = [
            found.predicted[0]._replace(matrix=call.matrices(size), tally=call.sent(size))
            for call in predicted(moved, gate, groups, form)
        ]
        with pytest.raises(TrafficMismatch):
            found.check()


def spread(x: Any, part: parts.Part, weights: Any = None) -> Any:
    """The whole send buffer of a part, collected in three pieces."""
    buffer, out = SendBuffer(x, part, weights), np.empty((part.num_sent, DIM), x.dtype)
    starts = [0, part.num_sent // 3, part.num_sent // 2]
    for start, stop in zip(starts, [*starts[1:], part.num_sent], strict=True):
        buffer.write(start, out[start:stop])
    np.testing.assert_array_equal(buffer.away(), out[: part.num_away])
    return out


def test_slopes_are_products_of_rows_and_derivatives() -> None:
    routing, weights = route(gate_of("gshard", 3), 2, 5)
    (part,) = parts.dropless(routing, start_loads(routing.load, None)())
    x, dy = tags(1, 2), np.random.default_rng(2).standard_normal((12, DIM))
    found = slopes([part], spread(x, part), dy, weights)
    kept = ~routing.is_dropped
    np.testing.assert_allclose(found[kept], (x * dy).sum(axis=1)[routing.token[kept]])
    assert not found[~kept].any()


@pytest.mark.parametrize("cached", [None, 1, 50, 2**18])
def test_spreading_is_the_derivative_of_combining(
    cached: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights; by the compiled loop, and in blocks of one row, of two, and of all."""
    if cached is not None:
        use_no_kernel(monkeypatch, cached)
    rng = np.random.default_rng(2)
    routing, weights = route(gate_of("gshard", 3), 2, 5)
    for (part,) in (
        parts.dropless(routing, start_loads(routing.load, None)()),
        parts.padded(routing, routing.capacity or 0, [2], 0),
    ):
        rows, dy = rng.standard_normal((part.num_sent, DIM)), rng.standard_normal((12, DIM))
        y = combined([part], rows, weights, dy)
        drows = spread(dy, part, weights[part.entry])
        assert (y * dy).sum() == pytest.approx((rows * drows).sum(), rel=1e-12)
        wanted = np.zeros_like(dy)
        np.add.at(wanted, part.token, rows[part.row] * weights[part.entry, None])
        np.testing.assert_allclose(y, wanted, rtol=1e-12)


def use_no_kernel(monkeypatch: pytest.MonkeyPatch, cached: int = 2**18) -> None:
    monkeypatch.setattr("moe.sums.sums.adding", lambda dtype: None)
    monkeypatch.setattr("moe.sums.sums.CACHED", cached)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_sums_are_the_same_with_and_without_the_kernel(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with and without factors; some have no rows."""
    rng = np.random.default_rng(4)
    number = np.sort(rng.integers(0, 9, 30))
    sums = Sums.of(rng.integers(0, 20, 30), number, 12)
    rows = rng.standard_normal((20, 33)).astype(dtype)
    y = np.float32 if dtype == "float16" else rows.dtype
    given = rng.standard_normal(30).astype(y)

    def results() -> list[Any]:
        found = [np.full((12, 33), np.nan, y) for _ in range(2)]
        for factors, out in zip((None, given), found, strict=True):
            add_up(rows, sums, factors, out)
        return found

    assert (kernel_of(rows, None, rows.dtype) is None) == (dtype == "float16")
    compiled = results()
    use_no_kernel(monkeypatch)
    assert kernel_of(rows, None, rows.dtype) is None
    for one, other in zip(compiled, results(), strict=True):
        assert one.dtype == other.dtype == y
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(
        compiled[0][number[0]],
        rows[sums.row[: sums.starts[number[0] + 1]]].astype(y).sum(axis=0),
        rtol=1e-4,
    )


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_added_in_the_same_order_on_all_ranks_and_in_all_parts(form: str) -> None:
    """To the bit: three experts for each token, of which ranks have different ones."""
    gate, groups, rng = GATES["stable"](8, k=3, capacity_factor=4.0), 4, np.random.default_rng(6)
    x, logits = (rng.standard_normal((groups * TOKENS, n)).astype("float32") for n in (DIM, 8))

    def fn(comm: Communicator, num_parts: int) -> Any:
        mine = np.array_split(np.arange(groups * TOKENS), comm.size)[comm.rank]
        each = groups // comm.size
        gated = gate.forward(logits[mine], num_groups=each)
        first = experts_of(8, comm.size, comm.rank).start

        def compute(rows: Received, out: Rows, part: parts.Part) -> None:
            for i in range(len(part.segments)):
                y = rows.of_expert(part, i) * np.float32(1.1 + first + i)
                out.set_of_expert(part, i, y)

        divided = parts_of(form, gated.routing, gate, [each] * comm.size, comm, num_parts)
        weights = gated.weights.astype("float32")
        return Exchange(comm).forward(x[mine], weights, divided, Step(), compute)[0]

    (wanted,) = collectives.run(partial(fn, num_parts=1), size=1)
    for size, num_parts in ((1, 3), (2, 1), (4, 1), (4, 2)):
        found = np.concatenate(collectives.run(partial(fn, num_parts=num_parts), size=size))
        np.testing.assert_array_equal(found, wanted, err_msg=f"{size} ranks, {num_parts} parts")


@pytest.mark.parametrize("form", FORMS)
def test_own_rows_are_the_last_of_a_buffer(form: str) -> None:
    """And are not sent; those of others are in the order of ranks."""

    def fn(comm: Communicator) -> None:
        gate = gate_of("stable", 5)
        routing, _ = route(gate, 2, comm.rank)
        for part in parts_of(form, routing, gate, [2, 2, 2], comm, 2):
            order = [r for r in range(3) if r != comm.rank] + [comm.rank]
            owner = np.repeat(order, [part.sent[rank] for rank in order])
            experts = routing.expert[part.entry]
            for row, expert in zip(part.row, experts, strict=True):
                owned = experts_of(5, 3, owner[row])
                assert owned.start <= expert < owned.stop
            assert part.counts.sent[comm.rank] == part.counts.received[comm.rank] == 0
            assert part.num_away == sum(part.counts.sent)

    collectives.run(fn, size=3)


def test_masks_have_one_token_in_each_slot() -> None:
    routing, weights = route(gate_of("switch", 4), 3, 1)
    found = masks(routing, weights, routing.capacity or 0)
    assert found.dispatch.sum(axis=1).max() == 1
    assert found.dispatch.sum() == (~routing.is_dropped).sum()
    np.testing.assert_allclose(found.combine.sum(), weights.sum())
