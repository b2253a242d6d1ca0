"""Ranks in a mesh with named axes, and which box of a parameter each rank has.

Slices of flat arrays and of batches are here too: contiguous, as even as possible.
"""

from parallel.mesh.mesh import AXES, ROW_AXES, Mesh
from parallel.mesh.placement import (
    Box,
    Piece,
    Placement,
    Shape,
    Split,
    boxes_of_range,
    length,
    pieces_of,
    span,
    split,
)

__all__ = [
    "AXES",
    "ROW_AXES",
    "Box",
    "Mesh",
    "Piece",
    "Placement",
    "Shape",
    "Split",
    "boxes_of_range",
    "length",
    "pieces_of",
    "span",
    "split",
]
