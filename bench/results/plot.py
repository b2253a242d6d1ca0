"""Draw results of the microbenchmark: bandwidth and latency against size, a line per contender.

    ring bench all_reduce -g 2 --algorithm all --native --limits -J result.json
    ring bench plot result.json --out result.svg

The name of the file says whether it is an SVG or a PNG.  Every line has its own marker and dashes,
so that it is known without its color; bands reach from quartile to quartile.  With --limits there
are two more lines: a copy of as many bytes in memory, and the lower bound, which is the least
exchange of messages that the collective needs.  It needs matplotlib: pip install
matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from bench.commands.options import option
from bench.contenders.contender import BOUND, MEMCPY
from bench.results.files import Key, Result, result
from bench.results.measurement import FORMS, Measurement, devices_text
from bench.workloads import sizes
from collectives.console import Command, Refused, output_file

FORMATS = (".svg", ".png")
Lines = Mapping[str, Sequence[tuple[int, Measurement]]]  # by label: size and what was measured
Groups = Mapping[str, Lines]  # by title

# Colors that differ in lightness too (Okabe and Ito 2008), a marker and dashes: all combinations
# of the three differ before any of them comes again.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "os^DvPX*<>"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (5, 1, 1, 1)), (0, (1, 1)))
_LIMITS: dict[str, dict[str, Any]] = {
    MEMCPY: {"label": "memcpy", "color": "#777777", "linestyle": ":", "linewidth": 2.5},
    BOUND: {"label": "lower bound", "color": "#000000", "linestyle": "--", "linewidth": 2.5},
}
_HIGH, _WIDE = 4.2, 12.0  # inches of a pair of drawings


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parse.add_argument("result", type=result, metavar="FILE.json", help="what COLLECTIVE -J wrote")
    option(parse, "--out", "a .svg or .png", type=picture_file, required=True, metavar="FILE")
    option(parse, "--form", "default: out of place, where there is such a form", choices=FORMS)


def picture_file(text: str) -> Path:
    """Return a file that can be written, of a kind that can be drawn; an argument type."""
    if Path(text).suffix not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text} is neither a .svg nor a .png")
    return output_file(text)


def run(options: argparse.Namespace) -> int:
    """Draw; return 0.  Raises Refused if there is no matplotlib."""
    groups = grouped(options.result, options.form)
    try:
        draw(groups, options.out)
    except ImportError as error:
        raise Refused(f"{error}; pip install matplotlib") from error
    return 0


def grouped(read: Result, form: str | None) -> Groups:
    """Return the lines of each collective, datatype, operator and root."""
    groups: dict[str, dict[str, list[tuple[int, Measurement]]]] = {}
    for key in drawn(read, form):
        lines = groups.setdefault(title_of(key, read.facts), {})
        lines.setdefault(key.name, []).append((key.size, read.measurements[key]))
    return groups


def drawn(read: Result, form: str | None) -> Iterator[Key]:
    """Yield the keys of a form, or else of out of place, or in place where there is no other."""
    for key in read.measurements:
        is_first = key.form == FORMS[0] or key._replace(form=FORMS[0]) not in read.measurements
        if key.collective != "barrier" and (is_first if form is None else key.form == form):
            yield key


def title_of(key: Key, facts: Mapping[str, Any]) -> str:
    """Return what is drawn, and where it was measured."""
    op = "" if key.op == "none" else f", {key.op}"
    root = "" if key.root < 0 else f", root {key.root}"
    devices = f" on {devices_text(facts['devices'])}" if "devices" in facts else ""
    ranks = f"{facts['ranks']} ranks{devices}"
    return f"{key.collective} on {ranks}, {key.dtype}{op}{root}, {facts['mpi']}"


def draw(groups: Groups, path: Path) -> None:
    """Draw two panels for each group.  Raises ImportError if there is no matplotlib."""
    import matplotlib as mpl  # noqa: PLC0415 - an optional dependency
    from matplotlib.figure import Figure  # noqa: PLC0415

    # Text stays text in an SVG, and no font has to be embedded.
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(_WIDE, _HIGH * len(groups)), layout="constrained")
        panels = figure.subplots(len(groups), 2, squeeze=False)
        for (title, lines), (left, right) in zip(groups.items(), panels, strict=True):
            _panel(left, lines, "bus bandwidth (GB/s)", bandwidths)
            _panel(right, lines, "time (us)", microseconds)
            left.set_title(title, loc="left")
            left.legend(fontsize="small")
        figure.savefig(path, dpi=150, metadata={"Title": "; ".join(groups)})


def _panel(axes: Any, lines: Lines, what: str, values: Any) -> None:
    """Draw lines over sizes, both on logarithmic scales."""
    for style, points in zip(styles(list(lines)), lines.values(), strict=True):
        x = [size for size, _ in points]
        low, median, high = zip(*(values(measurement) for _, measurement in points), strict=True)
        axes.plot(x, median, **style)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("size")
    axes.xaxis.set_major_formatter(lambda size, _: sizes.text(max(1, round(size))))
    axes.set_ylabel(what)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)


def styles(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield how each line is drawn: all differ in marker and dashes, the limits have no markers."""
    looks = zip(cycle(_COLORS), cycle(_MARKERS), cycle(_DASHES))
    for name in names:
        if name in _LIMITS:
            yield _LIMITS[name]
        else:
            color, marker, dashes = next(looks)
            yield {
                "label": name,
                "color": color,
                "marker": marker,
                "linestyle": dashes,
                "linewidth": 1.4,
                "markersize": 5,
            }


def microseconds(measurement: Measurement) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    return measurement.low * 1e6, measurement.seconds * 1e6, measurement.high * 1e6


def bandwidths(measurement: Measurement) -> tuple[float, float, float]:
    """Return bus bandwidths at the upper quartile of the times, the median and the lower one."""
    at_median, median = measurement.busbw, measurement.seconds
    return at_median * median / measurement.high, at_median, at_median * median / measurement.low


COMMAND = Command("bench.results.plot", __doc__, add_options, run)
