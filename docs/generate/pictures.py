"""Pictures of schedules: a line for each rank, a column for each round, arrows for messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from collectives.schedule import Schedule, incoming

_WIDE, _HIGH, _LEFT, _TOP = 110, 46, 64, 34  # of a round and a rank, and around them
_PLAIN, _COMBINED = "#3b5b92", "#b3542d"
MAX_MESSAGES = 48  # of a picture: more are no longer seen


def num_messages(schedules: Sequence[Schedule]) -> int:
    """Return how many arrows a picture has."""
    return sum(1 for _ in _messages(schedules))


def picture(schedules: Sequence[Schedule], title: str) -> str:
    """Return the schedules of all ranks, in order, as SVG."""
    num_ranks, num_rounds = len(schedules), max(map(len, schedules))
    width, height = _LEFT + _WIDE * num_rounds + 30, _TOP + _HIGH * num_ranks
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        "<defs>",
        *map(_head, (_PLAIN, _COMBINED)),
        "</defs>",
        *(_rank(rank, width) for rank in range(num_ranks)),
        *(_round(number) for number in range(num_rounds)),
        *(_arrow(*message) for message in _messages(schedules)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _messages(schedules: Sequence[Schedule]) -> Iterator[tuple[int, int, int, bool]]:
    """Yield (round, source, destination, whether it is combined) of every message."""
    for rank, schedule in enumerate(schedules):
        for number, operations in enumerate(schedule):
            for operation in incoming(operations):
                assert operation.peer is not None, "a message has a sender"
                yield number, operation.peer, rank, operation.kind == "recv_reduce"


def _y(rank: int) -> int:
    return _TOP + _HIGH * rank + _HIGH // 2


def _head(color: str) -> str:
    """Return the head of arrows of one color."""
    return (
        f'<marker id="{color[1:]}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
    )


def _rank(rank: int, width: int) -> str:
    return (
        f'<text x="8" y="{_y(rank) + 4}">rank {rank}</text>'
        f'<path d="M{_LEFT} {_y(rank)}H{width - 10}" stroke="#d5dae3"/>'
    )


def _round(number: int) -> str:
    x = _LEFT + _WIDE * number + _WIDE // 2
    return f'<text x="{x}" y="18" text-anchor="middle" fill="#5c6675">round {number}</text>'


def _arrow(number: int, source: int, dest: int, is_combined: bool) -> str:
    color, start = _COMBINED if is_combined else _PLAIN, _LEFT + _WIDE * number + 12
    return (
        f'<path d="M{start} {_y(source)}L{start + _WIDE - 24} {_y(dest)}" stroke="{color}" '
        f'stroke-width="1.6" fill="none" marker-end="url(#{color[1:]})"/>'
    )
