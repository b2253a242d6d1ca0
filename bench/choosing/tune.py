"""Measure what messages cost and which algorithms are fastest here, and write decisions.json.

    ring bench tune -g 4
    mpirun -n 4 python -m bench tune --only algorithms --collective all_reduce
    mpirun -n 4 python -m bench tune --check

Programs load FILE with `comm.load_decisions`.  Run the command on an otherwise idle machine, once
for each number of ranks: what FILE says of other numbers of ranks, and of collectives that are not
measured now, is kept.

First, the machine.  Ranks of one host, and of two, exchange messages in four patterns, copy and
combine arrays, and make calls that do nothing.  A machine of the LogGOPS model is fitted to these
times; it predicts all calls.  Samples in which a rank has lost its core to another program do not
count, and on a busy machine nothing is fitted, unless ranks outnumber the cores.

Then, the algorithms.  At every size they take turns.  Algorithms for which the cost model predicts
more than four times the shortest time are not measured.  Times within a tenth of the fastest count
as equal, and among equal ones the choice of the built-in rule stays.

With --device cuda the arrays are on GPUs, and ranks read each other's memory; a call that would be
staged ends the measurement.  Only algorithms are measured then, and their tables are apart from the
tables of host memory.

With --check every algorithm of every collective is then measured on 2 to 8 ranks, at sizes at which
nothing was fitted, and compared with its prediction.  The exit status is 1 if the median error is
above 10 %, its 90th percentile above 25 %, or if the algorithms that are predicted to be fastest
are more than 10 % slower than the fastest (in the geometric mean).  It is 2 if FILE or the options
are wrong, or if nothing can be fitted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpi4py import MPI

from bench.calls.start_ranks import with_ranks
from bench.choosing import predictions
from bench.choosing.algorithms import HOPELESS, AlgorithmMeasurement
from bench.choosing.machine import MachineMeasurement, left_out, link_table, work_table
from bench.choosing.sampling import Steps
from bench.commands import world
from bench.commands.options import (
    SECONDS,
    add_datatype,
    add_device,
    add_output,
    add_ranks,
    add_sizes,
    option,
)
from bench.provenance import provenance
from collectives import Communicator, ScheduleError, algorithms
from collectives.console import Refused, Table, at_least, console_for, progress, write_json
from collectives.devices import DeviceMode
from collectives.selection.decisions import Decisions, Measured, Ranks
from collectives.selection.machine_file import Fitted

MACHINE, ALGORITHMS, CHECK = PARTS = ("machine", "algorithms", "check")


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parse.set_defaults(op="sum", root="0", counts=None)
    about, default = "what is measured is written here", Path("decisions.json")
    option(parse, "--output", about, type=Path, default=default, metavar="FILE")
    about = "measure this alone; check: the machine that FILE has, perhaps on other ranks"
    option(parse, "--only", about, choices=PARTS)
    option(parse, "--check", "also compare predictions with measured calls", action="store_true")
    about = "about how long all may take, unless a few calls of everything take longer"
    option(parse, "--seconds", about, default=120.0, **SECONDS)
    about = "measure and check algorithms of this one; may be repeated; default: all"
    names: dict[str, Any] = {"choices": algorithms.collectives(), "metavar": "NAME"}
    option(parse, "--collective", about, dest="collectives", action="append", **names)
    add_datatype(parse)
    add_device(parse)
    add_sizes(parse)
    group = parse.add_argument_group("machine and check")
    about = "of each time of the machine and of the check"
    option(group, "--samples", about, type=at_least(3), default=400, metavar="N")
    about = (
        "for the machine all ranks exchange in pairs at once, as they do in collectives; always so "
        "if ranks outnumber the cores of a host"
    )
    option(group, "--at-once", about, action="store_true")
    add_ranks(parse)
    add_output(parse, is_local=False)


def run(options: argparse.Namespace) -> int:
    """Measure as told; return 0, or 1 if a goal of the check is not met.  Raises Refused."""

    def tuned(comm: Communicator) -> int:
        try:
            return Tuning(comm, options).run()
        except (TypeError, ValueError, ScheduleError) as error:  # on all ranks alike
            raise Refused(str(error)) from error

    device: DeviceMode = "auto" if options.device == "cpu" else "peer"
    return world.on_ranks(tuned, options.timeout, device=device)


class Tuning:
    """What one run of the command measures, prints and writes.

    All ranks raise TypeError, ValueError or ScheduleError if that is impossible.
    """

    def __init__(self, comm: Communicator, options: argparse.Namespace) -> None:
        if comm.size == 1:
            raise ValueError("on one rank there is nothing to choose; -g 4 starts four")
        self.comm, self.options, self.parts = comm, options, parts(options)
        world.check_output(options.json)
        self.known = earlier(comm, options.output)
        if CHECK in self.parts and MACHINE not in self.parts and self.known.fitted is None:
            raise ValueError(f"--only {options.only}: {options.output} has no machine to check")
        self.algorithms = AlgorithmMeasurement(comm, options) if ALGORITHMS in self.parts else None
        self.console = console_for(comm.rank, options, is_terminal=options.live)
        self.tables: dict[str, Any] = {}

    def run(self) -> int:
        """Measure all parts; return the exit status."""
        facts = {} if self.comm.rank else provenance()
        facts |= {"mpi": world.mpi_version(), "ranks": str(self.comm.size)}
        self.say(", ".join(f"{key} {value}" for key, value in facts.items()))
        left, status = self.options.seconds, 0
        for number, part in enumerate(self.parts):
            seconds, begin = left / (len(self.parts) - number), time.perf_counter()
            if part == MACHINE:
                self.write(self.known.with_machine(self.fitted(facts, seconds)))
            elif part == ALGORITHMS:
                self.write(self.fastest(facts, seconds))
            else:
                status = self.checked(seconds)
            left -= min(time.perf_counter() - begin, seconds)
        if self.comm.rank == 0:
            write_json({"facts": facts, "tables": self.tables}, self.options.json)
        return status

    def fitted(self, facts: Mapping[str, str], seconds: float) -> Fitted:
        """Measure the machine."""
        options = self.options
        measurement = MachineMeasurement(self.comm, options.samples, at_once=options.at_once)
        with self.steps("what messages cost", measurement.num_steps, seconds) as steps:
            fit = measurement.fit(steps)
        if texts := left_out(fit):
            self.say(f"Left out, because ranks lost their cores: {texts}")
        title = "Links (LogGOPS), and the median error of the fit for each pattern"
        self.show("links", title, link_table(fit))
        self.say(f"A call takes {fit.machine.call_seconds * 1e6:.2f} us in addition.")
        self.show("work", "Copies and combinations", work_table(fit))
        return Fitted(facts, fit.machine)

    def fastest(self, facts: Mapping[str, str], seconds: float) -> Decisions:
        """Measure the algorithms; return what is known with their tables."""
        measurement, hosts = self.algorithms, self.comm.topology
        assert measurement is not None, "there is one if this part is measured"
        rows = {}
        with self.steps("which algorithms are fastest", measurement.num_steps, seconds) as steps:
            for name, times in measurement.times(steps):
                title = f"{name} on {hosts.size} ranks"
                self.show(name, title, measurement.table(name, times))
                if names := measurement.left_out(name, times):
                    self.say(
                        f"Not measured where predicted to take over {HOPELESS} times the "
                        f"least: {', '.join(names)}"
                    )
                rows[name] = measurement.rows(name, times)
        facts = {**facts, "arrays": measurement.backend.kind, "dtype": self.options.dtype.name}
        on_device = measurement.on_device
        add = self.known.including_devices if on_device else self.known.including
        return add(Ranks(hosts.size, hosts.num_hosts), Measured(facts, rows))

    def checked(self, seconds: float) -> int:
        """Compare predictions with calls; return 0 if all goals are met, else 1."""
        assert self.known.fitted is not None, "without a machine nothing is checked"
        machine, samples = self.known.fitted.machine, self.options.samples
        names = self.options.collectives or algorithms.collectives()
        cases = predictions.cases(self.comm.size, names)
        with self.steps("calls that the fit has not seen", len(cases), seconds) as steps:
            calls = list(predictions.held_out(self.comm, machine, cases, samples, steps))
        if self.comm.rank == 0:
            for head, table in predictions.tables(calls):
                title = f"Errors of predictions by {head}, and the time of the pick over the best"
                self.show(f"check by {head}", title, table)
            whole = predictions.verdict(calls)
            self.say(predictions.conclusion(whole))
        is_met = MPI.COMM_WORLD.bcast(self.comm.rank == 0 and whole.is_met)
        return 0 if is_met else 1

    @contextmanager
    def steps(self, what: str, number: int, seconds: float) -> Iterator[Steps]:
        """Say what is measured and how long it may take; yield its steps, which are shown."""
        self.say(f"\nMeasuring {what}")
        with progress(self.console, number, lines=True, refresh=False) as show_text:

            def show(done: int, text: str, left: float) -> None:
                is_line = not self.console.is_terminal  # a bar says by itself how much is left
                show_text(done, f"{text}; about {left:.0f} s left" if is_line else text)

            yield Steps(number, seconds, show)

    def write(self, decisions: Decisions) -> None:
        """Write to the file what is known now."""
        self.known = decisions
        if self.comm.rank == 0:
            self.options.output.write_text(decisions.to_json())
        self.say(f"Written to {self.options.output}")

    def say(self, text: str) -> None:
        """Print a text on rank 0."""
        self.console.print(text)

    def show(self, name: str, title: str, table: Table) -> None:
        """Print a table on rank 0, and keep it for --json."""
        self.say(f"\n{title}")
        table.print(self.console)
        self.tables[name] = table.as_dicts()


def parts(options: argparse.Namespace) -> list[str]:
    """Return what is measured, in order; raise ValueError if options do not go together."""
    is_host = options.device == "cpu"
    usual = [MACHINE, ALGORITHMS] if is_host else [ALGORITHMS]
    chosen = [options.only] if options.only else usual
    chosen += [CHECK] * (options.check and CHECK not in chosen)
    if not is_host and chosen != [ALGORITHMS]:
        raise ValueError("--device cuda measures algorithms only; predictions are of host memory")
    return chosen


def earlier(comm: Communicator, path: Path) -> Decisions:
    """Return what the file says so far.

    All ranks raise ValueError if it is wrong, or Refused if it cannot be written.
    """
    world.check_output(path)
    if not MPI.COMM_WORLD.bcast(path.exists()):
        return Decisions({})
    comm.load_decisions(path)
    assert comm.decisions is not None, "they have just been loaded"
    return comm.decisions


COMMAND = with_ranks("tune", __doc__, add_options, run)
