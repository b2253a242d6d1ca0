"""Draw pipeline schedules and compare them.

    ring pipeline show 1f1b --stages 4 --micro-batches 8 --svg 1f1b.svg
    ring pipeline show schedule.csv --messages
    ring pipeline compare --stages 4 --micro-batches 8 --times 1:1:1
    ring pipeline formulas

Nothing is computed or sent.  Times are those of F, I and W of one stage: forward, and the halves of
backward, for the input and for the weights.  In a grid a column is the longest time of which all
are multiples.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

from rich.console import Console

from collectives.console import (
    Command,
    Number,
    Table,
    add_output_options,
    at_least,
    console_for,
    output_file,
    refusing,
    write_json,
)
from parallel.pipeline.messages import with_messages
from parallel.pipeline.picture import grid, in_time, svg
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.schedules import SCHEDULES, ScheduleInfo, make
from parallel.pipeline.simulation import Simulation, simulate
from parallel.pipeline.text import read_csv, write_csv
from parallel.pipeline.times import Times
from parallel.pipeline.validation import validate


def run(options: argparse.Namespace) -> int:
    """Do what the options ask for; return the exit status."""
    with refusing():
        COMMANDS[options.command](options, console_for(0, options))
    return 0


def show(options: argparse.Namespace, console: Console) -> None:
    """Print the grid of a schedule and what it costs; write the files that are asked for."""
    schedule = schedule_of(options)
    validate(schedule)
    simulation = simulate(schedule, options.times)
    lists = with_messages(schedule) if options.messages else schedule.actions
    if options.svg is not None:
        options.svg.write_text(svg(simulation, title_of(schedule)))
    if options.csv is not None:
        write_csv(lists, options.csv)
    console.print(title_of(schedule))
    drawn = grid(lists) if options.messages else in_time(simulation)
    console.print(drawn, soft_wrap=True)
    facts = facts_of(simulation)
    for name, value in facts.items():
        console.print(f"{name}: {value}")
    write_json({"schedule": schedule.name, **facts}, options.json)


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


def facts_of(simulation: Simulation) -> dict[str, str]:
    """Return what a schedule costs, by what it is."""
    ranks = range(simulation.schedule.num_ranks)
    of_total, of_ideal = simulation.fractions
    facts = {
        "time": f"{simulation.makespan}, bubble {simulation.bubble}: {float(of_total):.1%} of the"
        f" total, {float(of_ideal):.1%} of the work",
        "activations kept, by rank": " ".join(str(simulation.live(rank)) for rank in ranks),
        "messages sent, by rank": " ".join(map(str, simulation.num_messages)),
    }
    if simulation.schedule.is_asynchronous:
        alive = " ".join(str(simulation.versions(rank)[1]) for rank in ranks)
        facts["versions of parameters kept, by rank"] = alive
    return facts


def compare(options: argparse.Namespace, console: Console) -> None:
    """Print a table of all schedules, and why some are not in it."""
    p, m = options.stages, options.micro_batches
    table = Table(
        "schedule",
        *(Number("time", ".2f"), Number("bubble", ".2f"), Number("formula", ".2f")),
        *(Number("of total", ".1%"), Number("kept", ".2f"), Number("messages")),
        *(Number("stages"), Number("published", ".2f"), Number("of work", ".1%")),
        Number("versions"),
    )
    left_out = []
    for name, info in SCHEDULES.items():
        try:
            schedule = make(name, p, m)
        except ValueError as error:
            left_out.append(str(error))
            continue
        table.add(name, *row(simulate(schedule, options.times), info))
    console.print(
        f"{p} ranks, {m} micro-batches, F : I : W = {':'.join(map(str, options.times[:3]))}"
    )
    table.print(console)
    for line in (*LEGEND, *left_out):
        console.print(line)
    write_json({"schedules": table.as_dicts(), "left_out": left_out}, options.json)


LEGEND = (
    "Times and activations kept are those of one of P stages; where a rank has two, each is half.",
    "formula: - where it is not exact for these numbers.  published: by the paper.",
    "versions: of parameters, on one rank.",
)


def row(simulation: Simulation, info: ScheduleInfo) -> Iterator[float | str]:
    """Yield the numbers of a schedule; times and activations in units of one of P stages."""
    schedule, p = simulation.schedule, simulation.schedule.num_ranks
    share, m = Fraction(p, schedule.num_stages), schedule.num_micro_batches
    case = p, m, schedule.num_stages // p, simulation.times
    published = info.published or info.bubble
    of_total, of_work = map(float, simulation.fractions)
    yield float(simulation.makespan * share)
    yield float(simulation.bubble * share)
    yield float(info.bubble.of(*case) * share) if info.bubble.holds(*case) else "-"
    yield of_total
    yield float(max(simulation.live(rank) for rank in range(p)) * share)
    yield sum(simulation.num_messages)
    yield schedule.num_stages
    yield float(published.of(*case) * share)
    yield of_work
    yield max(simulation.versions(r)[1] for r in range(p)) if schedule.is_asynchronous else 1


def formulas(options: argparse.Namespace, console: Console) -> None:
    """Print what each schedule costs, as text, and what the letters mean."""
    tables = (
        Table("schedule", "what it is", "source"),
        Table("schedule", "stages of a rank", "bubble", "if", "published bubble"),
        Table("schedule", "activations kept", "messages", "needs"),
    )
    for name, info in SCHEDULES.items():
        chunks = "v" if name == "interleaved" else str(info.num_chunks)
        published = (info.published or info.bubble).text
        tables[0].add(name, info.title, info.source)
        tables[1].add(name, chunks, info.bubble.text, info.bubble.condition, published)
        tables[2].add(name, info.kept.text, info.messages.text, info.needs)
    for table in tables:
        table.print(console)
    console.print(
        "P ranks, m micro-batches, v stages on a rank, r the number of a rank.  F, I, W: the times"
        " of forward and of the two halves of backward of one stage; B = I + W; F&B: that of an F"
        " and a B that overlap.  Bubble: of the rank that waits longest, between its first and its"
        " last action.  Kept: from F to B or W, of one stage and micro-batch."
    )
    write_json([row for table in tables for row in table.as_dicts()], options.json)


COMMANDS: dict[str, Callable[[argparse.Namespace, Console], None]] = {
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


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the commands and their options."""
    commands = parse.add_subparsers(dest="command", required=True)
    positive = at_least(1)
    add_output_options(commands.add_parser("formulas", help="what each schedule costs"))
    for name, words in (("show", "draw one schedule"), ("compare", "a table of all schedules")):
        command = commands.add_parser(name, help=words)
        add = command.add_argument
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
        add_output_options(command)


COMMAND = Command("parallel.pipeline", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
