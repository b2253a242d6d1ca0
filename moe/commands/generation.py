"""One run of the command that generates text, and what it prints."""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
from rich.console import Console

from collectives import Communicator, phase
from collectives.console import console_for, unwritable, write_json
from moe.commands.arguments import gate_options, layer_options
from moe.layers import mixtures
from moe.models import bytes_read, count_reads, gate_by_name, moe_gpt, without_capacity
from moe.routing import RoutingLog
from parallel import Mesh, Model, TrafficMonitor, TrafficTable, checkpoint, gpt, raise_on_all_ranks
from parallel.accounts import gather_json
from parallel.commands import print_check, print_traffic
from parallel.inference import NEXT, Inference, check_request, generate
from parallel.nn import Array
from parallel.optim import dtype_of
from parallel.options import gpt_arguments


class Generation:
    """One run of the command, on one rank of `comm`.

    Raises ValueError, on all ranks, if options, checkpoint and ranks do not go together.
    """

    def __init__(self, comm: Communicator, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        with raise_on_all_ranks(comm, phase, "prepare", "looking at --json", ValueError):
            if comm.rank == 0 and options.json is not None and (why := unwritable(options.json)):
                raise ValueError(why)
        self.prompts = [os.fsencode(prompt) for prompt in options.prompt or ["\n"]]
        self.mesh, self.log = Mesh(comm, **options.mesh or {"data": comm.size}), RoutingLog()
        self.model = model_of(options, self.mesh, self.log)
        self.monitor = TrafficMonitor(comm, is_wanted=not options.no_monitor)
        self.inference = Inference(
            self.mesh,
            self.model,
            parameters_of(options, self.model, comm),
            len(self.prompts),
            phase=self.monitor.phase,
        )
        check_request(self.inference, self.prompts, options.tokens, options.temperature)
        count_reads(self.inference)

    def run(self) -> int:
        """Generate and print; return the exit status."""
        o, passes = self.options, self.inference.passes
        with self.monitor, self.comm.record() as ledger:
            texts = generate(
                self.inference, self.prompts, o.tokens, temperature=o.temperature, seed=o.seed
            )
        log = self.log.gathered(self.comm)
        for layer in mixtures(self.model):
            layer.expected = log
        read = bytes_read(self.inference, log, self.comm.rank)
        mine = {
            "rows": [*self.inference.rows],
            "texts": [text.decode("latin-1") for text in texts],
            "seconds": [one_pass.seconds for one_pass in passes],
            "read": [read, [one_pass.bytes_read for one_pass in passes]],
        }
        ranks, observed = gather_json(self.comm, mine), self.monitor.gather()
        whole = ledger.gather()
        self.mesh.free()
        if ranks is None or whole is None:
            return 0
        table = TrafficTable(
            self.inference.traffic(),
            whole,
            observed,
            size=self.comm.size,
            reason=self.monitor.reason,
        )
        return report(o, self.result(ranks), table, console_for(0, o))

    def result(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the options, texts, latencies and bytes of weights of all `ranks`, for JSON."""
        texts = {row: x for r in ranks for row, x in zip(r["rows"], r["texts"], strict=True)}
        is_next = [one_pass.phase == NEXT for one_pass in self.inference.passes]
        seconds = np.max([r["seconds"] for r in ranks], axis=0)
        predicted, counted = (np.array([r["read"][i] for r in ranks]) for i in range(2))
        return vars(self.options) | {
            "texts": [as_text(texts[row]) for row in sorted(texts)],
            "latencies": seconds[is_next].tolist(),
            "prompt_seconds": float(seconds[0]),
            "read_by_rank": {"predicted": predicted.tolist(), "counted": counted.tolist()},
            "read_per_token": counted.sum(axis=0)[is_next].tolist(),
            "dense_per_token": self.dense_bytes(),
            "model_bytes": int(self.model.num_parameters * self.inference.itemsize),
        }

    def dense_bytes(self) -> int:
        """Return the bytes of weights that all ranks read for a token, without experts."""
        names, ranks = [*self.model.layers][:-1], range(self.mesh.size)
        with_texts = [rank for rank in ranks if self.inference.of_rank[rank]]
        return sum(
            self.inference.dense_bytes(name, 1, rank) for rank in with_texts for name in names
        )


def model_of(options: argparse.Namespace, mesh: Mesh, log: RoutingLog) -> Model:
    """Return the model of the command line, whose experts have no capacity.

    Raises ValueError for options that the gate does not have, and for expert choice.
    """
    of_gpt = gpt_arguments(options) | {"mesh": mesh}
    of_gate, of_layer = gate_options(options), layer_options(options)
    if options.moe is None:
        if of_gate or of_layer or mesh.axes.get("expert", 1) > 1:
            raise ValueError("experts, and ranks along expert, need --moe GATE")
        return gpt(**of_gpt)
    gate = without_capacity(gate_by_name(options.moe, of_gate))
    return moe_gpt(gate=gate, num_experts=options.experts, log=log, **of_layer, **of_gpt)


def parameters_of(
    options: argparse.Namespace, model: Model, comm: Communicator
) -> dict[str, Array]:
    """Return the parameters of the checkpoint, or random ones: this rank's part, by unit."""
    if options.checkpoint is not None:
        path = checkpoint.latest(options.checkpoint) or options.checkpoint
        return checkpoint.load_parameters(path, model, comm, options.dtype)
    drawn = {unit: model.draw(unit, options.seed) for unit in model.units}
    return {unit: x.astype(dtype_of(options.dtype)) for unit, x in drawn.items()}


def as_text(word: str) -> str:
    """Return bytes, which are characters of Latin-1 in `word`, as UTF-8."""
    return word.encode("latin-1").decode(errors="replace")


# What is printed


def report(
    options: argparse.Namespace, result: dict[str, Any], table: TrafficTable, console: Console
) -> int:
    """Print the result and the traffic; return the exit status."""
    for text in result["texts"]:
        console.print(repr(text))
    if result["latencies"]:
        print_costs(result, console)
    write_json(result | {"traffic": table.as_dict()}, options.json)
    print_traffic(table, console)
    read = result["read_by_rank"]
    if read["predicted"] != read["counted"]:
        console.print(f"weights read differ from the prediction: {read}")
        return 1
    return 0 if print_check(table, console) else 1


def print_costs(result: dict[str, Any], console: Console) -> None:
    """Print the time that tokens took, and the weights that they read."""
    latencies = 1e3 * np.array(result["latencies"])
    middle, late = np.percentile(latencies, [50, 99])
    console.print(
        f"latency of a token: median {middle:.2f} ms, 99th percentile {late:.2f} ms, of"
        f" {len(latencies)}; prompt {1e3 * result['prompt_seconds']:.2f} ms"
    )
    read, dense = np.array(result["read_per_token"]), result["dense_per_token"]
    console.print(
        f"weights read for a token of each text: {dense} bytes dense and"
        f" {read.mean() - dense:.0f} of experts, {read.min() - dense} to"
        f" {read.max() - dense}; the model has {result['model_bytes']} bytes"
    )
