"""Train a small GPT with experts by every balancing scheme, and by none; say how even loads become.

    python -m bench balance
    python -m bench balance --only switch --only bias --steps 100 --seeds 2
    python -m bench balance --json balance.json --svg balance.svg

Every run is on one rank, on the same text, and from the same initial values for the same seed.  The
scheme "none" chooses the best k of the softmax; it has no loss beside that of the model, and
experts take all tokens.  Others are compared with "none" of the same k.  A run reports
averages over its last steps and all blocks:

- imbalance: the largest number of choices of an expert over the mean, dropped choices included; 1
  if all are equal, and the number of experts over k if all tokens choose the same ones;
- computed: the same of what experts compute, which a capacity limits whatever the router does;
- least: the smallest number of choices of an expert over the mean;
- dropped: the fraction of choices that no expert computes; in gshard also those second choices that
  are not drawn;
- loss: of the model alone, in nats per byte, on batches that it was not trained on.

Shown are the median, and the least and the most of all seeds.  A scheme is better balanced if its
imbalance is less than that of "none" for every seed.  The exit status is 0 whatever is found.

Gates have their usual options.  In expert-choice later tokens of a row decide about earlier ones,
so its loss is not comparable to others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from bench.balance_picture import picture
from bench.balance_runs import SCHEMES, Run, Scheme, Settings, baseline, train
from bench.balance_summary import MEASURES, Summary, summaries
from bench.docs.provenance import provenance
from collectives.export import output_file
from parallel import text
from parallel.cli import at_least, console_of, print_table, table_with

PACKAGES = ["collectives", "parallel", "moe"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add, usual = parser.add_argument, Settings()
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run=run, refuse=parser.error)
    add(
        "--only",
        action="append",
        choices=[each.name for each in SCHEMES],
        metavar="SCHEME",
        help="this one beside none; may be given several times; default: all",
    )
    add("--steps", type=at_least(1), default=usual.steps, help="default: %(default)s")
    add(
        "--last",
        type=at_least(1),
        default=usual.last,
        metavar="N",
        help="steps at the end that are reported; default: %(default)s",
    )
    add(
        "--seeds",
        type=at_least(1),
        default=5,
        metavar="N",
        help="runs of each scheme; default: %(default)s",
    )
    add(
        "--experts",
        type=at_least(2),
        default=usual.num_experts,
        metavar="N",
        help="of each block; default: %(default)s",
    )
    add("--layers", type=at_least(1), default=usual.num_layers, help="default: %(default)s")
    add("--hidden", type=at_least(1), default=usual.hidden, help="width; default: %(default)s")
    add("--batch", type=at_least(1), default=usual.rows, help="rows; default: %(default)s")
    add("--context", type=at_least(1), default=usual.context, help="default: %(default)s")
    add("--lr", type=float, default=usual.lr, help="default: %(default)s")
    add("--text", metavar="PATH", help="file or directory; default: Python's standard library")
    add("--json", type=output_file, metavar="FILE", help="write all runs to FILE")
    add("--svg", type=output_file, metavar="FILE", help="draw them in FILE")


def run(options: argparse.Namespace) -> int:
    """Train and tell; 0."""
    schemes, settings = chosen(options.only), settings_of(options)
    try:
        data = text.load(options.text)
        settings.check(data)
    except (OSError, ValueError) as error:
        options.refuse(str(error))
    console, runs = console_of(0), []
    for scheme in schemes:
        for seed in range(options.seeds):
            done = train(scheme, seed, settings, data).run(settings.last)
            imbalance, loss = done.measures.imbalance, done.measures.loss
            console.print(f"{scheme.name}, seed {seed}: imbalance {imbalance:.2f}, loss {loss:.4f}")
            runs.append(done)
    found = summaries(runs)
    console.print("\n".join([title(settings, options.seeds), ""]))
    show(found, console)
    write(options, settings, runs, found)
    return 0


def chosen(only: list[str] | None) -> list[Scheme]:
    """The schemes of these names, and those without balancing that they are compared with."""
    named = [each for each in SCHEMES if only is None or each.name in only]
    wanted = {each.name for each in named} | {baseline(each.k) for each in named}
    return [each for each in SCHEMES if each.name in wanted]


def settings_of(options: argparse.Namespace) -> Settings:
    """What all runs have in common."""
    return Settings(
        options.steps,
        min(options.last, options.steps),
        options.experts,
        options.layers,
        options.hidden,
        options.batch,
        options.context,
        options.lr,
    )


def title(settings: Settings, num_seeds: int) -> str:
    """What was trained, in a sentence."""
    s = settings
    return (
        f"{s.num_experts} experts in each of {s.num_layers} blocks of width {s.hidden};"
        f" {s.steps} steps of {s.rows} x {s.context} bytes, of which the last {s.last} are shown;"
        f" {num_seeds} seeds"
    )


def show(found: list[Summary], console: Any) -> None:
    """A row for each scheme, and sentences on which are better balanced than none."""
    table = table_with("scheme", numbers=["k", *MEASURES, "beside none", "loss beside none"])
    for each in found:
        table.add_row(each.name, str(each.k), *cells(each))
    print_table(table, console)
    console.print("\n".join(verdict(found)))


def cells(summary: Summary) -> Iterator[str]:
    """The numbers of a row: of each measure the median and the range."""
    for name, spread in summary.measures.items():
        digits = 3 if name == "loss" else 2
        low, middle, high = (f"{x:.{digits}f}" for x in spread)
        yield f"{middle} ({low}-{high})"
    yield f"{summary.num_better} of {summary.num_seeds} better"
    yield f"{summary.loss_beside:+.3f}"


def verdict(found: list[Summary]) -> Iterator[str]:
    """Which schemes are better balanced than none in all seeds, and which are not."""
    others = [each for each in found if not each.is_baseline]
    better = [each.name for each in others if each.is_better]
    worse = [f"{x.name} ({x.num_better} of {x.num_seeds})" for x in others if not x.is_better]
    yield f"better balanced than none of the same k, in every seed: {', '.join(better) or 'no one'}"
    if worse:
        yield f"not in every seed: {', '.join(worse)}"


def write(
    options: argparse.Namespace, settings: Settings, runs: list[Run], found: list[Summary]
) -> None:
    """Write the files that are asked for."""
    if options.svg is not None:
        options.svg.write_text(picture(runs, title(settings, options.seeds)))
    if options.json is not None:
        result = as_dict(settings, options.seeds, runs, found)
        options.json.write_text(json.dumps(result) + "\n")


def as_dict(
    settings: Settings, num_seeds: int, runs: list[Run], found: list[Summary]
) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "provenance": provenance(PACKAGES),
        "settings": settings._asdict(),
        "seeds": num_seeds,
        "summaries": [each.as_dict() for each in found],
        "runs": [each.as_dict() for each in runs],
    }
