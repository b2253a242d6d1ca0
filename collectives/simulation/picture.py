"""A picture of how much of the time the links of a network are in use: the darker, the more."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np
from numpy.typing import NDArray

from collectives.simulation.network import Network

_CELL, _LEFT, _TOP, _PER_ROW = 11, 210, 58, 64  # pixels, and links in a row
_FONT = 'font-family="system-ui, sans-serif" font-size="12"'


def picture(
    title: str, label: str, seconds: float, link_bytes: NDArray[np.float64], network: Network
) -> str:
    """Return a heat map as SVG: a block of cells for each kind of link.

    Parameters
    ----------
    title, label : str
        What was simulated, and the algorithm.
    seconds : float
        The time of the call.
    link_bytes : array
        The bytes that each link carried.
    network : Network
        The network.
    """
    capacities, kinds, names = network.links
    share = link_bytes / capacities / max(seconds, 1e-300)
    top = _TOP
    body: list[str] = []
    for kind, name in enumerate(names):
        mine = share[kinds == kind]
        body += _block(name, mine, top)
        top += (-(-len(mine) // _PER_ROW) + 1) * _CELL
    width = _LEFT + _PER_ROW * _CELL + 10
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" {_FONT}>',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{top}" fill="#ffffff"/>',
            f'<text x="8" y="18">{escape(title)}</text>',
            f'<text x="8" y="38">{escape(label)}; in use, of the time:</text>',
            *_legend(),
            *body,
            "</svg>\n",
        ]
    )


def _legend() -> Iterator[str]:
    for number in range(11):
        x = _LEFT + 60 + number * 2 * _CELL
        yield _cell(x, 28, number / 10, 2 * _CELL)
    yield f'<text x="{_LEFT + 30}" y="38">0 %</text>'
    yield f'<text x="{_LEFT + 66 + 22 * _CELL}" y="38">100 %</text>'


def _block(name: str, shares: NDArray[np.float64], top: int) -> Iterator[str]:
    """Yield the name of a kind of link, and a cell for each link."""
    yield f'<text x="8" y="{top + 10}">{escape(name)}: {len(shares)}</text>'
    for number, share in enumerate(shares.tolist()):
        row, column = divmod(number, _PER_ROW)
        yield _cell(_LEFT + column * _CELL, top + row * _CELL, share, _CELL)


def _cell(x: int, y: int, share: float, width: int) -> str:
    grey = round(255 * (1 - min(1.0, share)))
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{_CELL}" '
        f'fill="rgb({grey},{grey},{grey})" stroke="#999999" stroke-width="0.4"/>'
    )
