"""Draw pipeline schedules and compare them.

    python -m parallel.pipeline show 1f1b --stages 4 --micro-batches 8 --svg 1f1b.svg
    python -m parallel.pipeline show schedule.csv --messages
    python -m parallel.pipeline compare --stages 4 --micro-batches 8 --times 1:1:1

Nothing is computed or sent.  Times are those of F, I and W of one stage: forward, and the halves of
backward, for the input and for the weights.  In a grid a column is a unit of time.
"""

from __future__ import annotations

import argparse
import sys
from fractions import Fraction
from pathlib import Path

from parallel import cli
from parallel.pipeline.catalogue import SCHEDULES, ScheduleInfo, make
from parallel.pipeline.messages import with_messages
from parallel.pipeline.picture import grid, in_time, svg
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.simulation import Simulation, Times, simulate
from parallel.pipeline.text import read_csv, write_csv
from parallel.pipeline.validation import validate


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for; return the exit status."""
    parse = parser()
    options = parse.parse_args(arguments)
    try:
        lines = compare(options) if options.command == "compare" else show(options)
    except (OSError, ValueError) as error:
        parse.exit(2, f"{parse.prog}: {error}\n")
    cli.console_of(0).print("\n".join(lines), markup=False, soft_wrap=True)
    return 0


def show(options: argparse.Namespace) -> list[str]:
    """Return the grid of a schedule and what it costs; write the files that are asked for."""
    schedule = schedule_of(options)
    validate(schedule)
    simulation = simulate(schedule, options.times)
    lists = with_messages(schedule) if options.messages else schedule.actions
    if options.svg is not None:
        options.svg.write_text(svg(simulation, title_of(schedule)))
    if options.csv is not None:
        write_csv(lists, options.csv)
    return [
        title_of(schedule),
        grid(lists) if options.messages else in_time(simulation),
        *facts(simulation),
    ]


def schedule_of(options: argparse.Namespace) -> Schedule:
    """Return the schedule of a name or a file."""
    if options.schedule.endswith(".csv"):
        return read_csv(Path(options.schedule))
    chunks = options.chunks
    return make(options.schedule, options.stages, options.micro_batches, num_chunks=chunks)


def title_of(schedule: Schedule) -> str:
    """Return the name and sizes of a schedule."""
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages,"
        f" {schedule.num_micro_batches} micro-batches"
    )


def facts(simulation: Simulation) -> list[str]:
    """Return what a schedule costs."""
    ranks = range(simulation.schedule.num_ranks)
    of_total, of_ideal = simulation.fractions
    found = [
        f"time {simulation.makespan}, bubble {simulation.bubble}: {of_total:.1%} of the total,"
        f" {of_ideal:.1%} of the work",
        f"activations kept, by rank: {' '.join(str(simulation.live(rank)) for rank in ranks)}",
        f"messages sent, by rank: {' '.join(map(str, simulation.num_messages))}",
    ]
    if simulation.schedule.is_asynchronous:
        alive = " ".join(str(simulation.versions(rank)[1]) for rank in ranks)
        found.append(f"versions of parameters kept, by rank: {alive}")
    return found


def compare(options: argparse.Namespace) -> list[str]:
    """Print a table of all schedules; return why some are not in it."""
    p, m = options.stages, options.micro_batches
    table = cli.table_with(
        "schedule",
        numbers=["stages", "time", "bubble", "formula", "of total", "of work", "kept", "versions",
                 "messages"],
    )  # fmt: skip
    left_out = []
    for name, info in SCHEDULES.items():
        try:
            schedule = make(name, p, m)
        except ValueError as error:
            left_out.append(f"{error}")
            continue
        table.add_row(name, *row(simulate(schedule, options.times), info))
    console = cli.console_of(0)
    console.print(
        f"{p} ranks, {m} micro-batches, F : I : W = {':'.join(map(str, options.times[:3]))}"
    )
    cli.print_table(table, console)
    return [*LEGEND, *left_out]


LEGEND = (
    "Times and activations kept are those of one of P stages; where a rank has two, each is half.",
    "formula: - where it is not exact for these numbers.  versions: of parameters, on one rank.",
)


def row(simulation: Simulation, info: ScheduleInfo) -> list[str]:
    """Return the numbers of a schedule; times and activations in units of one of P stages."""
    schedule, p = simulation.schedule, simulation.schedule.num_ranks
    share, m = Fraction(p, schedule.num_stages), schedule.num_micro_batches
    found = info.bubble(p, m, schedule.num_stages // p, simulation.times)
    by_formula = f"{float(found * share):g}" if info.is_exact(p, m, simulation.times) else "-"
    kept = max(simulation.live(rank) for rank in range(p))
    versions = max(simulation.versions(r)[1] for r in range(p)) if schedule.is_asynchronous else 1
    numbers = [simulation.makespan * share, simulation.bubble * share]
    cells = [f"{float(x):g}" for x in numbers]
    fractions = [f"{x:.1%}" for x in simulation.fractions]
    return [
        str(schedule.num_stages), *cells, by_formula, *fractions, f"{float(kept * share):g}",
        str(versions), str(sum(simulation.num_messages)),
    ]  # fmt: skip


def times_of(word: str) -> Times:
    """Return the times of "1:1:1" or "2:2.5:1"; an argument type."""
    try:
        forward, backward_input, backward_weight = map(Fraction, word.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not F:I:W, such as 1:1:1") from None
    return Times(forward, backward_input, backward_weight)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parse = argparse.ArgumentParser("python -m parallel.pipeline", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parse.add_subparsers(dest="command", required=True)
    positive = cli.at_least(1)
    for name, words in (("show", "draw one schedule"), ("compare", "a table of all schedules")):
        add = commands.add_parser(name, help=words).add_argument
        if name == "show":
            add("schedule", help=f"{', '.join(SCHEDULES)}, or a CSV file as PyTorch writes it")
            add("--chunks", type=positive, help="stages on a rank; of interleaved only")
            add("--messages", action="store_true", help="show lists with sends and receives")
            add("--svg", type=Path, metavar="FILE", help="write a drawing")
            add("--csv", type=Path, metavar="FILE", help="write the lists as PyTorch reads them")
        add("--stages", type=positive, default=4, metavar="P", help="ranks; default: %(default)s")
        add("--micro-batches", type=positive, default=8, metavar="M", help="default: %(default)s")
        add("--times", type=times_of, default=Times(), metavar="F:I:W",
            help="of a stage; default: 1:1:1")  # fmt: skip
    return parse


if __name__ == "__main__":
    sys.exit(main())
