"""A picture of balancing schemes: a row for each, with imbalance over time and loads at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from statistics import median

from bench.experts.balance_runs import Run, baseline

_HIGH, _TOP, _LEFT = 66, 56, 170  # of a row, above all rows, and left of both drawings
_CURVE, _BARS, _GAP = 420, 240, 70  # pixels of the drawings, and between them
_PLAIN, _NONE, _LINE, _WORDS = "#3b5b92", "#b3542d", "#d5dae3", "#5c6675"


def picture(runs: Sequence[Run], title: str) -> str:
    """Return all schemes as SVG, with the loads of the first block and seed.

    Curves are medians of all seeds.  Those without balancing are behind those of the same k.
    """
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.scheme, []).append(run)
    width, height = _LEFT + _CURVE + _GAP + _BARS + 20, _TOP + _HIGH * len(by_name) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18">{escape(title)}</text>',
        *_heads(),
    ]
    for i, (name, mine) in enumerate(by_name.items()):
        y = _TOP + _HIGH * i
        lines.append(f'<text x="8" y="{y + _HIGH // 2 + 4}">{escape(name)}</text>')
        lines += _curves(mine, by_name[baseline(mine[0].k)], y)
        lines += _bars(mine[0], y)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _heads() -> Iterator[str]:
    bars = _LEFT + _CURVE + _GAP
    first = "imbalance over all steps (thin: none)"
    for x, words in ((_LEFT, first), (bars, "choices (filled: computed)")):
        yield f'<text x="{x}" y="{_TOP - 10}" fill="{_WORDS}">{words}</text>'


def _curves(mine: list[Run], none: list[Run], y: int) -> Iterator[str]:
    """Yield the imbalance of a scheme over that of none, from 1 to the most that there can be."""
    low, high = y + _HIGH - 10, y + 6
    most = len(mine[0].choices[0]) / mine[0].k
    yield f'<path d="M{_LEFT} {high}V{low}H{_LEFT + _CURVE}" stroke="{_LINE}" fill="none"/>'
    for value, at in ((1, low), (most, high + 8)):
        yield f'<text x="{_LEFT - 6}" y="{at}" text-anchor="end" fill="{_WORDS}">{value:g}</text>'
    for runs, color, wide in ((none, _NONE, 0.8), (mine, _PLAIN, 2.0)):
        values = [median(point) for point in zip(*(run.imbalance for run in runs), strict=True)]
        step, scale = _CURVE / max(1, len(values) - 1), (low - high) / max(1, most - 1)
        points = (
            f"{_LEFT + step * i:.1f} {low - scale * (v - 1):.1f}" for i, v in enumerate(values)
        )
        path = f"M{'L'.join(points)}"
        yield f'<path d="{path}" stroke="{color}" stroke-width="{wide}" fill="none"/>'


def _bars(run: Run, y: int) -> Iterator[str]:
    """Yield how often each expert was chosen, the most often first, and what it computed."""
    choices, load = run.choices[0], run.load[0]
    left, low, high = _LEFT + _CURVE + _GAP, y + _HIGH - 10, y + 6
    wide, scale = _BARS / len(choices), (low - high) / max(choices)
    for i, expert in enumerate(sorted(range(len(choices)), key=lambda e: -choices[e])):
        x, tall, full = left + wide * i + 1, scale * choices[expert], scale * load[expert]
        yield _box(x, low - tall, wide - 2, tall, "none")
        yield _box(x, low - full, wide - 2, full, _PLAIN)
    mean = low - scale * sum(choices) / len(choices)
    yield f'<path d="M{left} {mean:.1f}h{_BARS}" stroke="{_NONE}" stroke-dasharray="3 3"/>'


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"'
        f' stroke="{_PLAIN}"/>'
    )
