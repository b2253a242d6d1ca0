"""A picture of a training step in time: a row for each index along the axis ``pipe``."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from parallel.predict.time import Span, StepTime

_WIDTH, _HIGH, _LEFT, _TOP = 1000, 26, 60, 66  # pixels of the step, of a row, and around
_FILLS = {"forward": "#e8e8e8", "backward": "#a8a8a8"}
# Patterns of axes, which differ in grey as well: lines to the right, to the left, crossed, dots.
_PATTERNS = (
    "M0 6L6 0",
    "M0 0L6 6",
    "M0 6L6 0M0 0L6 6",
    "M3 2V4",
    "M0 3H6",
    "M3 0V6",
    "M0 3H6M3 0V6",
)


def step_picture(step: StepTime, title: str) -> str:
    """Return the step as SVG: forward light, backward dark, and waiting in a pattern by axis."""
    axes = list(dict.fromkeys(axis for i in range(len(step.spans)) for axis in step.exposed(i)))
    patterns = {axis: f"axis{number}" for number, axis in enumerate(axes)}
    height = _TOP + _HIGH * len(step.spans) + 10
    scale = _WIDTH / step.seconds if step.seconds else 0.0
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 10} {height}"'
            ' font-family="system-ui, sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            *(_pattern(number, _PATTERNS[number % len(_PATTERNS)]) for number in range(len(axes))),
            f'<rect width="{_LEFT + _WIDTH + 10}" height="{height}" fill="#ffffff"/>',
            f'<text x="8" y="18">{escape(title)}</text>',
            *_legend(patterns),
            *(
                line
                for index, spans in enumerate(step.spans)
                for line in _row(index, spans, patterns, scale)
            ),
            "</svg>\n",
        ]
    )


def _pattern(number: int, path: str) -> str:
    return (
        f'<pattern id="axis{number}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<path d="{path}" stroke="#000000" fill="none"/></pattern>'
    )


def _fill(what: str, patterns: dict[str, str]) -> str:
    return _FILLS.get(what) or f"url(#{patterns[what]})"


def _legend(patterns: dict[str, str]) -> Iterator[str]:
    for number, what in enumerate((*_FILLS, *patterns)):
        x = _LEFT + 130 * number
        yield _box(x, 34, 24, 14, _fill(what, patterns))
        yield f'<text x="{x + 30}" y="46">{escape(what)}</text>'


def _row(index: int, spans: list[Span], patterns: dict[str, str], scale: float) -> Iterator[str]:
    y = _TOP + _HIGH * index
    yield f'<text x="8" y="{y + 15}">pipe {index}</text>'
    for what, begin, end in _joined(spans):
        yield _box(
            _LEFT + begin * scale, y, (end - begin) * scale, _HIGH - 4, _fill(what, patterns)
        )


def _joined(spans: list[Span]) -> Iterator[Span]:
    """Yield the spans, with adjacent spans of the same kind joined."""
    joined: Span | None = None
    for span in spans:
        if joined is not None and (joined.what, joined.end) == (span.what, span.begin):
            joined = joined._replace(end=span.end)
            continue
        if joined is not None:
            yield joined
        joined = span
    if joined is not None:
        yield joined


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{fill}"'
        ' stroke="#666666" stroke-width="0.3"/>'
    )
