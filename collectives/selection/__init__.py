"""Selection: which algorithm a call runs, and why (named, measured, or by rule), and its cost.

All ranks choose the same algorithm, because the choice depends only on what all of them know.
"""

from collectives.selection.choice import Choice, even_parts
from collectives.selection.cost import bounds_met
from collectives.selection.decisions import Decisions, machine_in
from collectives.selection.explanation import Explanation, explain
from collectives.selection.labels import parse_default
from collectives.selection.prediction import Prediction, predict, programs
from collectives.selection.select import (
    LOCAL_DEFAULTS,
    choose,
    is_local,
    preferences,
    preferred,
    sends_counts_ahead,
    using,
)

__all__ = [
    "LOCAL_DEFAULTS",
    "Choice",
    "Decisions",
    "Explanation",
    "Prediction",
    "bounds_met",
    "choose",
    "even_parts",
    "explain",
    "is_local",
    "machine_in",
    "parse_default",
    "predict",
    "preferences",
    "preferred",
    "programs",
    "sends_counts_ahead",
    "using",
]
