"""Gates: which experts a token goes to, with which weights, and what is added to the loss.

`gate` has the class, made of `scores`, `selections`, `losses` and a rule of `capacity`; `named` has
the gates of the literature.
"""

from moe.gates.capacity import RULES
from moe.gates.gate import Gate, Gated
from moe.gates.losses import Balance, Importance, Load, RouterZ
from moe.gates.named import GATES
from moe.gates.scores import SIGMOID, SOFTMAX, score_bytes
from moe.gates.selections import Chosen, SelectionInput

__all__ = [
    "GATES",
    "RULES",
    "SIGMOID",
    "SOFTMAX",
    "Balance",
    "Chosen",
    "Gate",
    "Gated",
    "Importance",
    "Load",
    "RouterZ",
    "SelectionInput",
    "score_bytes",
]
