"""TODO."""

from collectives.selection.decisions import Decisions
from collectives.selection.explanation import Explanation, explain
from collectives.selection.labels import named
from collectives.selection.select import choose, preferences, preferred, using

__all__ = [
    "Decisions",
    "Explanation",
    "choose",
    "explain",
    "named",
    "preferences",
    "preferred",
    "using",
]
