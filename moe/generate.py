"""Generate text with a small GPT with experts; compare what it reads and sends with predictions.

    python -m collectives.launch -n 4 -m moe.generate --mesh expert=2,tensor=2 --moe switch \\
        --checkpoint FOLDER --prompt "def " --prompt "class " --tokens 32
    python -m moe.generate --threads 2 --mesh tensor=2 --temperature 0.8 --prompt "import "

The model is that of a checkpoint of `parallel.train` with the same options of the model; without
one, its weights are random.  Ranks along ``data`` and ``expert`` have different texts.  The texts
do not depend on the mesh.  Experts take all tokens that choose them, whatever their capacity was.

Rank 0 prints the texts; the latency of a token, from one to the next, of the slowest rank; how many
bytes of weights all ranks read for a token of each text: those of the dense layers, and of the
experts that the tokens chose; and the traffic (predicted, recorded and observed).  The exit status
is 1 if columns differ, and 2 if the arguments do not go together.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from collectives import Communicator, phase
from collectives.export import unwritable
from moe.cli import add_expert_options
from moe.gpt import gate_by_name, moe_gpt
from moe.inference import bytes_read, count_reads, without_capacity
from moe.layer import mixtures
from moe.log import RoutingLog
from parallel import (
    Mesh,
    TrafficMismatch,
    TrafficMonitor,
    TrafficTable,
    checkpoint,
    cli,
    gpt,
    raise_on_all_ranks,
)
from parallel.accounts import gather_json
from parallel.inference import NEXT, Inference, check_request, generate
from parallel.job import on_ranks, preparing, running
from parallel.nn import Array, Model
from parallel.optim import DTYPES, dtype_of
from parallel.presets import GATE_OPTIONS, MOE_OPTIONS, given_options


def main(arguments: list[str] | None = None) -> int:
    """Generate as the command line says; return the exit status."""
    parse = parser()
    options = parse.parse_args(arguments)
    return on_ranks(parse, options, partial(run, options=options))


def run(comm: Communicator, options: argparse.Namespace) -> int:
    """Generate on one rank; return the exit status.  Raise InvalidRun before the first token."""
    with preparing():
        job = Generation(comm, options)
    with running(options):
        return job.run()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parse = argparse.ArgumentParser("python -m moe.generate", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    positive, add = cli.at_least(1), parse.add_argument
    add("--mesh", type=cli.mesh_axes, metavar="AXIS=N,...",
        help="of data, expert and tensor; default: data=N for N ranks")  # fmt: skip
    add("--checkpoint", type=Path, metavar="DIR", help="the last one in DIR; default: no training")
    add("--prompt", action="append", metavar="TEXT", help="may be repeated; default: a newline")
    add("--tokens", type=positive, default=16, metavar="N",
        help="bytes to generate after the longest prompt; default: %(default)s")  # fmt: skip
    add("--temperature", type=float, default=0.0, metavar="T",
        help="0: the most likely byte; more: drawn; default: %(default)s")  # fmt: skip
    add("--seed", type=cli.at_least(0), default=0, help="of what is drawn; default: %(default)s")
    add("--dtype", choices=DTYPES, default="float64", help="to compute in; default: %(default)s")
    add("--threads", type=positive, metavar="N", help="run N ranks as threads, without MPI")
    add("--json", type=Path, metavar="FILE", help="write texts, latencies and traffic to FILE")
    add("--no-monitor", action="store_true", help="do not read MPI's own counters")
    cli.add_gpt_options(parse.add_argument_group("model").add_argument)
    add_expert_options(parse.add_argument_group("mixtures of experts").add_argument)
    return parse


def model_of(options: argparse.Namespace, mesh: Mesh, log: RoutingLog) -> Model:
    """Return the model of the command line, whose experts have no capacity.

    Raises ValueError for options that the gate does not have, and for expert choice.
    """
    of_gpt = cli.gpt_options(options) | {"mesh": mesh}
    of_gate, of_layer = (given_options(options, names) for names in (GATE_OPTIONS, MOE_OPTIONS))
    if options.moe is None:
        if of_gate or of_layer or mesh.axes.get("expert", 1) > 1:
            raise ValueError("experts, and ranks along expert, need --moe GATE")
        return gpt(**of_gpt)
    gate = without_capacity(gate_by_name(options.moe, of_gate))
    return moe_gpt(gate=gate, num_experts=options.experts, log=log, **of_layer, **of_gpt)


class Generation:
    """One run of the command, on one rank of `comm`.

    Raises ValueError, on all ranks, if options, checkpoint and ranks do not go together.
    """

    def __init__(self, comm: Communicator, options: argparse.Namespace) -> None:
        self.comm, self.options, self.console = comm, options, cli.console_of(comm.rank)
        with raise_on_all_ranks(comm, phase, "prepare", "looking at --json", ValueError):
            if comm.rank == 0 and options.json is not None and (why := unwritable(options.json)):
                raise ValueError(why)
        self.prompts = [os.fsencode(prompt) for prompt in options.prompt or ["\n"]]
        self.mesh, self.log = Mesh(comm, **options.mesh or {"data": comm.size}), RoutingLog()
        self.model = model_of(options, self.mesh, self.log)
        self.monitor = TrafficMonitor(comm, is_wanted=not options.no_monitor)
        self.inference = Inference(
            self.mesh, self.model, self.parameters(), len(self.prompts), phase=self.monitor.phase
        )
        check_request(self.inference, self.prompts, options.tokens, options.temperature)
        count_reads(self.inference)

    def parameters(self) -> dict[str, Array]:
        """Return those of the checkpoint, or random ones: this rank's part, by unit."""
        o, model = self.options, self.model
        if o.checkpoint is not None:
            path = checkpoint.latest(o.checkpoint) or o.checkpoint
            return checkpoint.load_parameters(path, model, self.comm, o.dtype)
        drawn = {unit: model.draw(unit, o.seed) for unit in model.units}
        return {unit: x.astype(dtype_of(o.dtype)) for unit, x in drawn.items()}

    def run(self) -> int:
        """Generate and print; return the exit status."""
        o = self.options
        with self.monitor, self.comm.record() as ledger:
            texts = generate(
                self.inference, self.prompts, o.tokens, temperature=o.temperature, seed=o.seed
            )
        log = self.log.gathered(self.comm)
        for layer in mixtures(self.model):
            layer.expected = log
        counted = [each.bytes_read for each in self.inference.passes]
        mine = {
            "rows": [*self.inference.rows], "texts": [text.decode("latin-1") for text in texts],
            "seconds": [each.seconds for each in self.inference.passes],
            "read": [bytes_read(self.inference, log, self.comm.rank), counted],
        }  # fmt: skip
        ranks, observed = gather_json(self.comm, mine), self.monitor.gather()
        whole = ledger.gather()
        self.mesh.free()
        if ranks is None or whole is None:
            return 0
        table = TrafficTable(
            self.inference.traffic(), whole, observed, size=self.comm.size,
            reason=self.monitor.reason,
        )  # fmt: skip
        return self.report(self.result(ranks), table)

    def result(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """Return texts, latencies and bytes of weights from what ranks have found, for JSON."""
        texts = {row: x for r in ranks for row, x in zip(r["rows"], r["texts"], strict=True)}
        is_next = [each.phase == NEXT for each in self.inference.passes]
        seconds = np.max([each["seconds"] for each in ranks], axis=0)
        predicted, counted = (np.array([r["read"][i] for r in ranks]) for i in range(2))
        return vars(self.options) | {
            "texts": [as_text(texts[row]) for row in sorted(texts)],
            "latencies": seconds[is_next].tolist(),
            "prompt_seconds": float(seconds[0]),
            "read_by_rank": {"predicted": predicted.tolist(), "counted": counted.tolist()},
            "read_per_token": counted.sum(axis=0)[is_next].tolist(),
            "dense_per_token": self.dense_bytes(),
        }

    def dense_bytes(self) -> int:
        """Return the bytes of weights that all ranks read for a token, without experts."""
        names, ranks = [*self.model.layers][:-1], range(self.mesh.size)
        with_texts = [rank for rank in ranks if self.inference.of_rank[rank]]
        each = (self.inference.dense_bytes(name, 1, rank) for rank in with_texts for name in names)
        return sum(each)

    def report(self, result: dict[str, Any], table: TrafficTable) -> int:
        """Print the result and the traffic; return the exit status."""
        for text in result["texts"]:
            self.console.print(repr(text), markup=False)
        self.print_costs(result)
        if self.options.json is not None:
            words = json.dumps(result | {"traffic": table.as_dict()}, default=os.fspath, indent=1)
            self.options.json.write_text(words + "\n")
        cli.print_traffic(table, self.console)
        read = result["read_by_rank"]
        if read["predicted"] != read["counted"]:
            self.console.print(f"weights read differ from the prediction: {read}", markup=False)
            return 1
        try:
            self.console.print(table.check())
        except TrafficMismatch as mismatch:
            self.console.print(f"TrafficMismatch: {mismatch}", markup=False)
            return 1
        return 0

    def print_costs(self, result: dict[str, Any]) -> None:
        """Print the time that tokens took, and the weights that they read."""
        latencies = 1e3 * np.array(result["latencies"])
        if len(latencies):
            middle, late = np.percentile(latencies, [50, 99])
            self.console.print(
                f"latency of a token: median {middle:.2f} ms, 99th percentile {late:.2f} ms, of"
                f" {len(latencies)}; prompt {1e3 * result['prompt_seconds']:.2f} ms"
            )
            read, dense = np.array(result["read_per_token"]), result["dense_per_token"]
            self.console.print(
                f"weights read for a token of each text: {dense} bytes dense and"
                f" {read.mean() - dense:.0f} of experts, {read.min() - dense} to"
                f" {read.max() - dense}; the model has {self.num_bytes()} bytes"
            )

    def num_bytes(self) -> int:
        """Return the bytes of the parameters of the whole model."""
        return int(self.model.num_parameters * self.inference.itemsize)


def as_text(word: str) -> str:
    """Return bytes, which are characters of Latin-1 in `word`, as UTF-8."""
    return word.encode("latin-1").decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
