"""A mixture of experts on ranks that divide its experts, beside the same on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator
from moe.exchange.buffers import SendBuffer
from moe.gates import GATES, Gate
from moe.layers.mixture import MixtureOfExperts
from moe.routing import RoutingLog
from parallel import MemoryTracker, Mesh, TrafficTable
from parallel.mesh import span
from parallel.nn import (
    Activations,
    ArraySpec,
    BatchRows,
    Dropout,
    Gelu,
    Layer,
    Linear,
    Model,
    Sequential,
    Step,
)
from parallel.optim import dtype_of
from tests.moe.routing.tables import digests
from tests.parallel.nn.bound_models import Bound
from tests.parallel.nn.tensor.split_layers import bound_by_name, check_halves

ROWS, CONTEXT, DIM, HIDDEN = 7, 4, 6, 5
SEED, STEP_NUMBER = 3, 2
SIZES = [1, 2, 3, 4, 8]
CLOSE = {"float64": 1e-12, "float32": 1e-5}
OPTIONS: dict[str, dict[str, Any]] = {
    "sigmoid": {"num_nodes": 2, "most_nodes": 1},
    "expert-choice": {"capacity_factor": 3.0},
}


def mlp(dim: int = DIM, hidden: int = HIDDEN, dropout: float = 0.0) -> Layer:
    drop = {"drop": Dropout(dropout, "drop")} if dropout else {}
    return Sequential(
        {"up": Linear(dim, hidden), "gelu": Gelu(), **drop, "down": Linear(hidden, dim)}
    )


class Setup(NamedTuple):
    """A gate by name, and how its experts are divided; losses have a factor of order 1.

    With `all_to_one` a token has only one first choice: the gate has a large bias for the last
    expert, and all tokens of the text are equal.
    """

    gate: str
    num_experts: int = 4
    size: int = 1
    padding: str = "none"
    num_parts: int = 1
    dtype: str = "float64"
    options: tuple[tuple[str, Any], ...] = ()
    payload: str = "same"
    dispatch: str = "flat"
    ranks_per_host: int | None = None
    dim: int = DIM
    hidden: int = HIDDEN
    dropout: float = 0.0
    rows_per_group: int = 1
    num_rows: int = ROWS
    all_to_one: bool = False

    def make_gate(self) -> Gate:
        options = OPTIONS.get(self.gate, {}) | dict(self.options)
        gate = GATES[self.gate](self.num_experts, **options)
        rate = 0.001 if self.all_to_one else gate.bias_rate
        losses = tuple(replace(loss, factor=1.0) for loss in gate.losses)
        return replace(gate, losses=losses, bias_rate=rate)

    def make(
        self, mesh: Mesh | None, log: RoutingLog, expert: Callable[[], Layer] | None = None
    ) -> MixtureOfExperts:
        layer = MixtureOfExperts(
            self.dim,
            self.make_gate(),
            expert or partial(mlp, self.dim, self.hidden, self.dropout),
            mesh=mesh,
            padding=self.padding,
            num_parts=self.num_parts,
            payload=self.payload,
            log=log,
            dispatch=self.dispatch,
            ranks_per_host=self.ranks_per_host,
            rows_per_group=self.rows_per_group,
        )
        layer.bias[-1] += 1000 * self.all_to_one
        return layer

    def bound(
        self, mesh: Mesh, log: RoutingLog, expert: Callable[[], Layer] | None = None
    ) -> tuple[MixtureOfExperts, Bound]:
        """The layer, with parameters, and with communicators: its later calls are only its own."""
        layer = self.make(mesh, log, expert)
        for axis in layer.comm_axes:
            mesh[axis]
        return layer, bound_by_name(Model({"only": layer}, mesh=mesh), self.dtype)

    def rows(self, part: int = 0, num_parts: int = 1) -> tuple[range, ...]:
        """Of each rank, the rows of the batch in a micro-batch, which is a part: whole groups."""
        each, found = self.rows_per_group, []
        for rank in range(self.size):
            mine = span(self.num_rows // each, self.size, rank)
            some = span(mine.stop - mine.start, num_parts, part)
            found.append(range((mine.start + some.start) * each, (mine.start + some.stop) * each))
        return tuple(found)

    def whole(self, name: str) -> Any:
        seed = {"x": 5, "dy": 6}[name]
        rng = np.random.default_rng(seed)
        shape = (self.num_rows, CONTEXT, self.dim)
        return rng.standard_normal(shape).astype(dtype_of(self.dtype))

    def step(self, rank: int, part: int = 0, num_parts: int = 1) -> Step:
        rows = BatchRows(STEP_NUMBER, self.rows(part, num_parts), SEED)
        mine = slice(rows.of_rank[rank].start, rows.of_rank[rank].stop)
        number = 1 if self.all_to_one else 256
        whole = np.random.default_rng(8).integers(0, number, (self.num_rows, CONTEXT))
        return Step(
            whole[mine],
            total=whole.size,
            context=CONTEXT,
            tokens=whole[mine],
            batch=rows,
            loss_scale=2.0,
        )

    def spec(self, rank: int) -> ArraySpec:
        rows = BatchRows(STEP_NUMBER, self.rows(), SEED)
        shape = (len(rows.of_rank[rank]), CONTEXT, self.dim)
        return ArraySpec(
            shape,
            dtype_of(self.dtype).itemsize,
            context=CONTEXT,
            length=CONTEXT,
            rank=rank,
            batch=rows,
        )

    def run(self, expected: RoutingLog | None = None) -> list[Found]:
        """Forward and backward on all ranks; predictions follow from the log of one rank."""

        def fn(comm: Communicator) -> Found:
            mesh, log = Mesh(comm, expert=self.size), RoutingLog()
            layer, made = self.bound(mesh, log)
            layer.expected = expected or log
            part = self.rows()[mesh.rank]
            x, dy = (self.whole(name)[part.start : part.stop].copy() for name in ("x", "dy"))
            step = self.step(mesh.rank)
            with comm.record() as ledger:
                with collectives.phase("forward"):
                    y, saved = layer.forward(x, step)
                memory = MemoryTracker()
                memory.track("saved", saved)
                with collectives.phase("backward"):
                    dx = layer.backward(dy, saved)
            gradients = {name: each.copy() for name, each in made.named_gradients().items()}
            rest = check_halves(made, layer, dy, saved, dx)
            record, table = ledger.gather(), None
            if record is not None and expected is not None:
                calls = [
                    replace(call, phase=f"{phase}/{call.phase}")
                    for rank in range(self.size)
                    for phase, each in layer.traffic(self.spec(rank))._asdict().items()
                    for call in each
                ]
                table = TrafficTable(calls, record, None, size=self.size)
            formulas = (
                []
                if expected is None
                else [layer.activation_bytes(self.spec(rank)) for rank in range(self.size)]
            )
            return Found(
                y,
                dx,
                gradients,
                step.losses,
                log,
                memory.now["saved"],
                rest,
                formulas,
                made.model,
                table,
            )

        found: list[Found] = collectives.run(fn, size=self.size, timeout=60)
        return found

    def routed(self, num_parts: int) -> list[RoutingLog]:
        """What each rank routes in forward of so many micro-batches."""

        def fn(comm: Communicator) -> RoutingLog:
            mesh, log = Mesh(comm, expert=self.size), RoutingLog()
            layer, _ = self.bound(mesh, log)
            for part in range(num_parts):
                step = self.step(mesh.rank, part, num_parts)
                mine = self.rows(part, num_parts)[mesh.rank]
                layer.forward(self.whole("x")[mine.start : mine.stop], step)
            return log

        found: list[RoutingLog] = collectives.run(fn, size=self.size, timeout=60)
        return found


class Found(NamedTuple):
    """What a rank has computed and counted."""

    y: Any
    dx: Any
    gradients: dict[str, Any]
    losses: list[float]
    log: RoutingLog
    saved: int
    rest: int
    formulas: list[Activations]
    model: Model
    table: TrafficTable | None


def check_equal(found: list[Found], alone: Found, tolerance: float) -> None:
    """Outputs, derivatives, losses and gradients of all ranks are those of one rank."""
    for name in ("y", "dx"):
        parts = np.concatenate([getattr(each, name) for each in found])
        close(parts, getattr(alone, name), tolerance, name)
    close(sum(sum(each.losses) for each in found), sum(alone.losses), tolerance, "loss")
    for name, whole in alone.gradients.items():
        total = np.zeros_like(whole)
        for each in found:
            box = each.model.specs[name].box(each.model.mesh)
            total[box.slices] += each.gradients[name]
        close(total, whole, tolerance, name)


def close(x: Any, wanted: Any, tolerance: float, name: str) -> None:
    scale = max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(x, wanted, rtol=0, atol=tolerance * scale, err_msg=name)


@cache
def alone(setup: Setup) -> Found:
    (found,) = setup._replace(size=1, num_parts=1, dispatch="flat", ranks_per_host=None).run()
    return found


def check_all(setup: Setup, one: Found, dtype: str = "float64") -> list[Found]:
    """What ranks compute, route, keep and send is what one rank computes, and what is predicted."""
    found = setup.run(one.log)
    check_equal(found, one, CLOSE[dtype])
    assert digests([each.log for each in found], CONTEXT) == digests([one.log], CONTEXT)
    for each in found:
        for formula, other in zip(each.formulas, found, strict=True):
            assert (formula.saved, formula.rest) == (other.saved, other.rest)
    if setup.size > 1:
        assert found[0].table is not None
        assert found[0].table.check()
    return found


def bytes_of(found: list[Found]) -> dict[str, int]:
    """The bytes that are sent, by the last word of the phase."""
    assert found[0].table is not None
    sent: Counter[str] = Counter()
    for row in found[0].table.rows:
        sent[row.phase.partition("/")[2]] += row.recorded.bytes
    return dict(sent)


def spoil_messages(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Let the first row of tokens in each message be zero, or that of the second: "doubled"."""
    away = SendBuffer.away

    def spoiled(self: SendBuffer) -> Any:
        rows = away(self)
        if len(rows) > 1:
            rows[0] = rows[1] if how == "doubled" else 0
        return rows

    monkeypatch.setattr(SendBuffer, "away", spoiled)


def moved(log: RoutingLog, distance: int, where: tuple[int, str] | None = None) -> RoutingLog:
    """Return a log in which one token went to an expert that is so many numbers further.

    One token of each part; or of the first part of the step and the layer in `where` alone.
    """
    found = RoutingLog()
    for key, parts in log.parts.items():
        for i, (row, routing) in enumerate(parts.items()):
            if where is None or (key == where and i == 0):
                expert = routing.expert.copy()
                kept = np.flatnonzero(~routing.is_dropped)[0]
                expert[kept] = (expert[kept] + distance) % routing.num_experts
                routing = replace(routing, expert=expert)
            found.add(*key, row, routing)
    return found
