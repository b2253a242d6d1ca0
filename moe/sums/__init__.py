"""Sums of rows of arrays, by number, on the host with a compiled loop.

Each sum adds its rows in ascending order.
"""

from moe.sums.sorting import distinct_order, stable_order
from moe.sums.sums import Sums, add_up, blocks, scattered, sums_of

__all__ = ["Sums", "add_up", "blocks", "distinct_order", "scattered", "stable_order", "sums_of"]
