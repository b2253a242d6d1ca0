"""The ranks of the command torch_traffic.  Needs torch and MPI."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import collectives.torch
from bench.torch.strategies import ALGORITHM, STRATEGIES, Strategy
from bench.torch.transformer import Sizes, TrainingStep, transformer
from collectives import Ledger
from collectives.console import (
    Cell,
    Command,
    Number,
    Table,
    add_output_options,
    console_for,
    write_json,
)
from collectives.torch import Options
from parallel import PredictedCall, TrafficMismatch, TrafficMonitor, TrafficTable

ALGORITHMS = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), ALGORITHM)
SIZES = Sizes(hidden=32, vocabulary=64, context=16)
WARM_UP = 2  # steps before the one that is recorded: DDP chooses its buckets anew after the first
TOGETHER = "together"


class Row(NamedTuple):
    """What is sent in one pass of a step, along one dimension of the mesh."""

    strategy: str
    step: str
    dimension: str
    collective: str


class Trained(NamedTuple):
    """A strategy, the calls predicted for a step, and on rank 0 the ledger of all ranks."""

    strategy: Strategy
    calls: list[PredictedCall]
    ledger: Ledger | None


def run(options: argparse.Namespace) -> int:
    """Train with every strategy, and print what was sent; return 1 if a byte differs."""
    torch.set_num_threads(1)
    distributed.init_process_group("ring", pg_options=Options(algorithms=ALGORITHMS))
    comm = collectives.torch.communicator()
    with TrafficMonitor(comm) as monitor:
        all_trained = [trained(strategy, monitor) for strategy in STRATEGIES]
    observed = monitor.gather()
    status = 0 if comm.rank else show(all_trained, observed, comm.size, monitor.reason, options)
    comm.barrier()  # the launcher may end the job when rank 0 fails
    distributed.destroy_process_group()
    return status


def trained(strategy: Strategy, monitor: TrafficMonitor) -> Trained:
    """Train some steps, and record the last one."""
    size = distributed.get_world_size()
    model = transformer(SIZES)
    calls = strategy.predicted(model, size)
    mesh = init_device_mesh("cpu", strategy.shape(size), mesh_dim_names=strategy.names)
    step = TrainingStep(strategy.divide(model, mesh), SIZES, seed=0)
    for _ in range(WARM_UP):
        step()
    with monitor.phase(strategy.name), collectives.torch.record(step.model) as ledger:
        step()
    return Trained(strategy, calls, ledger.gather())


def show(
    all_trained: list[Trained],
    observed: dict[str, Any] | None,
    size: int,
    reason: str | None,
    options: argparse.Namespace,
) -> int:
    """Print and write the table and whether its columns are equal; return 1 if they are not."""
    columns = ["calls", "predicted", "recorded", "observed"]
    table = Table("strategy", "pass", "mesh", "collective", *map(Number, columns))
    problems = []
    for trained in all_trained:
        name, ledger = trained.strategy.name, trained.ledger
        assert ledger is not None, "this is rank 0"
        seen = None if observed is None else {name: observed[name]}
        for row in rows_of(trained, ledger, seen, size):
            table.add(*row)
        try:
            TrafficTable(trained.calls, ledger, seen, size=size, reason=reason).check()
        except TrafficMismatch as error:
            problems.append(f"{name}: {error}")
    console = console_for(0, options)
    table.print(console)
    console.print(*problems or [_equal(reason)], sep="\n")
    write_json({"rows": table.as_dicts(), "problems": problems}, options.json)
    return int(bool(problems))


def rows_of(
    trained: Trained, ledger: Ledger, observed: dict[str, Any] | None, size: int
) -> list[list[Cell]]:
    """Return the lines of one strategy, and one of their sums, which MPI observed."""
    predicted, recorded, calls = Counter[Row](), Counter[Row](), Counter[Row]()
    for call in trained.calls:
        row, sent = row_of(call.phase, call.axis, call.collective), call.sent(size)
        predicted[row] += sent.bytes
        calls[row] += sent.calls or 0
    for key, summary in ledger.summary(("phase", "axis", "collective")).items():
        recorded[row_of(*key)] += summary.bytes
    lines: list[list[Cell]] = [
        [*row, calls[row], predicted[row], recorded[row], None]
        for row in dict.fromkeys([*predicted, *recorded])
    ]
    name = trained.strategy.name
    seen = "n/a" if observed is None else int(observed[name][1].sum())
    sums = [sum(column.values()) for column in (calls, predicted, recorded)]
    return [*lines, [name, TOGETHER, "", "", *sums, seen]]


def row_of(phase: str, axis: str, collective: str) -> Row:
    """Return the row of a phase, whose outermost part is the strategy; then comes the pass."""
    strategy, part, *_ = f"{phase}/".split("/")
    return Row(strategy, part, axis, collective)


def _equal(reason: str | None) -> str:
    """Return the sentence on columns that are equal, with why MPI was not observed."""
    if reason is None:
        return "predicted = recorded = observed by MPI, to the byte"
    return f"predicted = recorded, to the byte; not observed: {reason}"


COMMAND = Command("bench.torch.traffic_ranks", __doc__, add_output_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
