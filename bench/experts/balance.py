"""Train a small GPT with experts by every balancing scheme, and by none; say how even loads become.

    ring bench balance
    ring bench balance --only switch --only bias --steps 100 --seeds 2
    ring bench balance --json balance.json --svg balance.svg

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
from collections.abc import Iterator

from bench.commands.options import COUNT, add_output, option
from bench.experts.balance_picture import picture
from bench.experts.balance_runs import SCHEMES, Scheme, Settings, baseline, train
from bench.experts.balance_summary import MEASURES, Summary, summaries
from bench.provenance import provenance
from collectives.console import (
    Command,
    Number,
    Table,
    at_least,
    console_for,
    output_file,
    positive_number,
    refusing,
    write_json,
)
from parallel import text


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    usual = Settings()
    about = "this one beside none; may be given several times; default: all"
    names = [scheme.name for scheme in SCHEMES]
    option(parse, "--only", about, action="append", choices=names, metavar="SCHEME")
    option(parse, "--steps", "of a run", default=usual.steps, **COUNT)
    about = "steps at the end that are reported"
    option(parse, "--last", about, default=usual.last, **COUNT)
    option(parse, "--seeds", "runs of each scheme", default=5, **COUNT)
    about = "of each block"
    kind, default = at_least(2), usual.num_experts
    option(parse, "--experts", about, type=kind, default=default, metavar="N")
    option(parse, "--layers", "blocks", default=usual.num_layers, **COUNT)
    option(parse, "--hidden", "width", default=usual.hidden, **COUNT)
    option(parse, "--batch", "rows", default=usual.rows, **COUNT)
    option(parse, "--context", "bytes of a row", default=usual.context, **COUNT)
    option(parse, "--lr", "learning rate", type=positive_number, default=usual.lr)
    about = "file or directory; default: Python's standard library"
    option(parse, "--text", about, metavar="PATH")
    option(parse, "--svg", "draw the runs in FILE", type=output_file, metavar="FILE")
    add_output(parse)


def run(options: argparse.Namespace) -> int:
    """Train and tell; return 0.  Raises Refused."""
    settings = settings_of(options)
    with refusing():
        data = text.load(options.text)
        settings.check(data)
    console, runs = console_for(0, options), []
    for scheme in chosen(options.only):
        for seed in range(options.seeds):
            done = train(scheme, seed, settings, data).run(settings.last)
            imbalance, loss = done.measures.imbalance, done.measures.loss
            console.print(f"{scheme.name}, seed {seed}: imbalance {imbalance:.2f}, loss {loss:.4f}")
            runs.append(done)
    of_schemes, title = summaries(runs), title_of(settings, options.seeds)
    console.print(f"{title}\n")
    table_of(of_schemes).print(console)
    console.print("\n".join(verdict(of_schemes)))
    if options.svg is not None:
        options.svg.write_text(picture(runs, title))
    result = {
        "provenance": provenance(),
        "settings": settings._asdict(),
        "seeds": options.seeds,
        "summaries": [summary.as_dict() for summary in of_schemes],
        "runs": [run.as_dict() for run in runs],
    }
    write_json(result, options.json)
    return 0


def chosen(only: list[str] | None) -> list[Scheme]:
    """Return the schemes of these names, and those without balancing to compare them with."""
    named = [scheme for scheme in SCHEMES if only is None or scheme.name in only]
    wanted = {scheme.name for scheme in named} | {baseline(scheme.k) for scheme in named}
    return [scheme for scheme in SCHEMES if scheme.name in wanted]


def settings_of(options: argparse.Namespace) -> Settings:
    """Return what all runs have in common."""
    o = options
    model = (o.experts, o.layers, o.hidden, o.batch, o.context)
    return Settings(o.steps, min(o.last, o.steps), *model, o.lr)


def title_of(settings: Settings, num_seeds: int) -> str:
    """Return what was trained, in a sentence."""
    s = settings
    return (
        f"{s.num_experts} experts in each of {s.num_layers} blocks of width {s.hidden};"
        f" {s.steps} steps of {s.rows} x {s.context} bytes, of which the last {s.last} are shown;"
        f" {num_seeds} seeds"
    )


def table_of(summaries: list[Summary]) -> Table:
    """Return a row for each scheme."""
    heads = ["k", *MEASURES, "beside none"]
    table = Table("scheme", *map(Number, heads), Number("loss beside none", "+.3f"))
    for summary in summaries:
        better = f"{summary.num_better} of {summary.num_seeds} better"
        table.add(summary.name, summary.k, *spreads(summary), better, summary.loss_beside)
    return table


def spreads(summary: Summary) -> Iterator[str]:
    """Yield the median and the range of each measure."""
    for name, spread in summary.measures.items():
        digits = 3 if name == "loss" else 2
        low, middle, high = (f"{x:.{digits}f}" for x in spread)
        yield f"{middle} ({low}-{high})"


def verdict(summaries: list[Summary]) -> Iterator[str]:
    """Yield which schemes are better balanced than none in all seeds, and which are not."""
    others = [summary for summary in summaries if not summary.is_baseline]
    better = [summary.name for summary in others if summary.is_better]
    worse = [f"{x.name} ({x.num_better} of {x.num_seeds})" for x in others if not x.is_better]
    yield f"better balanced than none of the same k, in every seed: {', '.join(better) or 'no one'}"
    if worse:
        yield f"not in every seed: {', '.join(worse)}"


COMMAND = Command("bench.experts.balance", __doc__, add_options, run)
