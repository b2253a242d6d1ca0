"""Draw pipeline schedules and compare them.

    python -m parallel.pipeline show 1f1b --stages 4 --micro-batches 8 --svg 1f1b.svg
    python -m parallel.pipeline show schedule.csv --messages
    python -m parallel.pipeline compare --stages 4 --micro-batches 8 --times 1:1:1
    python -m parallel.pipeline formulas

Nothing is computed or sent.  Times are those of F, I and W of one stage: forward, and the halves of
backward, for the input and for the weights.  In a grid a column is the longest time of which all
are multiples.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from collectives.export import output_file
from parallel import cli
from parallel.pipeline.messages import with_messages
from parallel.pipeline.picture import grid, in_time, svg
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.schedules import SCHEDULES, ScheduleInfo, make
from parallel.pipeline.simulation import Simulation, simulate
from parallel.pipeline.text import read_csv, write_csv
from parallel.pipeline.times import Times
from parallel.pipeline.validation import validate


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for; return the exit status."""
    parse = parser()
    options = parse.parse_args(arguments)
    try:
        lines = COMMANDS[options.command](options)
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
    lines = [
        f"time {simulation.makespan}, bubble {simulation.bubble}: {float(of_total):.1%} of the"
        f" total, {float(of_ideal):.1%} of the work",
        f"activations kept, by rank: {' '.join(str(simulation.live(rank)) for rank in ranks)}",
        f"messages sent, by rank: {' '.join(map(str, simulation.num_messages))}",
    ]
    if simulation.schedule.is_asynchronous:
        alive = " ".join(str(simulation.versions(rank)[1]) for rank in ranks)
        lines.append(f"versions of parameters kept, by rank: {alive}")
    return lines


def compare(options: argparse.Namespace) -> list[str]:
    """Print a table of all schedules; return why some are not in it."""
    p, m = options.stages, options.micro_batches
    table = cli.table_with(
        "schedule",
        numbers=[
            "stages",
            "time",
            "bubble",
            "formula",
            "published",
            "of total",
            "of work",
            "kept",
            "versions",
            "messages",
        ],
    )
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
    "formula: - where it is not exact for these numbers.  published: by the paper.",
    "versions: of parameters, on one rank.",
)


def row(simulation: Simulation, info: ScheduleInfo) -> list[str]:
    """Return the numbers of a schedule; times and activations in units of one of P stages."""
    schedule, p = simulation.schedule, simulation.schedule.num_ranks
    share, m = Fraction(p, schedule.num_stages), schedule.num_micro_batches
    case = p, m, schedule.num_stages // p, simulation.times
    published = info.published or info.bubble
    by_formula = [f"{float(x.of(*case) * share):g}" for x in (info.bubble, published)]
    kept = max(simulation.live(rank) for rank in range(p))
    versions = max(simulation.versions(r)[1] for r in range(p)) if schedule.is_asynchronous else 1
    numbers = [simulation.makespan * share, simulation.bubble * share]
    return [
        str(schedule.num_stages),
        *(f"{float(x):g}" for x in numbers),
        by_formula[0] if info.bubble.holds(*case) else "-",
        by_formula[1],
        *(f"{float(x):.1%}" for x in simulation.fractions),
        f"{float(kept * share):g}",
        str(versions),
        str(sum(simulation.num_messages)),
    ]


def formulas(options: argparse.Namespace) -> list[str]:
    """Print what each schedule costs, as text; return what the letters mean."""
    table = cli.table_with(
        "schedule",
        "what it is",
        "source",
        "stages of a rank",
        "bubble",
        "if",
        "published bubble",
        "activations kept",
        "messages",
        "needs",
        numbers=[],
    )
    for name, info in SCHEDULES.items():
        chunks = "v" if name == "interleaved" else str(info.num_chunks)
        published = (info.published or info.bubble).text
        bubble = info.bubble.text, info.bubble.condition
        cells = info.title, info.source, chunks, *bubble, published, info.kept.text
        table.add_row(name, *cells, info.messages.text, info.needs)
    cli.print_table(table, cli.console_of(0))
    return [
        "P ranks, m micro-batches, v stages on a rank, r the number of a rank.",
        "F, I, W: the times of forward and of the two halves of backward of one stage; B = I + W;",
        "F&B: that of an F and a B that overlap.  Bubble: of the rank that waits longest, between",
        "its first and its last action.  Kept: from F to B or W, of one stage and micro-batch.",
    ]


COMMANDS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "show": show,
    "compare": compare,
    "formulas": formulas,
}


def times_of(word: str) -> Times:
    """Return the times of "1:1:1" or "2:2.5:1"; an argument type."""
    try:
        forward, backward_input, backward_weight = map(Fraction, word.split(":"))
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{word!r} is not F:I:W, such as 1:1:1") from None
    if min(forward, backward_input, backward_weight) < 0 or not forward:
        raise argparse.ArgumentTypeError(f"{word}: times must not be negative, nor F be 0")
    return Times(forward, backward_input, backward_weight)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parse = argparse.ArgumentParser("python -m parallel.pipeline", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parse.add_subparsers(dest="command", required=True)
    positive = cli.at_least(1)
    commands.add_parser("formulas", help="what each schedule costs")
    for name, words in (("show", "draw one schedule"), ("compare", "a table of all schedules")):
        add = commands.add_parser(name, help=words).add_argument
        if name == "show":
            add("schedule", help=f"{', '.join(SCHEDULES)}, or a CSV file as PyTorch writes it")
            add("--chunks", type=positive, help="stages on a rank; of interleaved only")
            add("--messages", action="store_true", help="show lists with sends and receives")
            add("--svg", type=output_file, metavar="FILE", help="write a drawing")
            add(
                "--csv",
                type=output_file,
                metavar="FILE",
                help="write the lists as PyTorch reads them",
            )
        add("--stages", type=positive, default=4, metavar="P", help="ranks; default: %(default)s")
        add("--micro-batches", type=positive, default=8, metavar="M", help="default: %(default)s")
        add(
            "--times",
            type=times_of,
            default=Times(),
            metavar="F:I:W",
            help="of a stage; default: 1:1:1",
        )
    return parse


if __name__ == "__main__":
    sys.exit(main())
