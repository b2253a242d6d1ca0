"""Gates: which experts a token goes to, with which weights, and what is added to the loss.

`gate` has the class, made of `scores`, `selections`, `losses` and a rule of `capacity`; `named` has
the gates of the literature.
"""

from moe.gates.capacity import RULES
from moe.gates.gate import Gate, Gated
from moe.gates.losses import Balance, Importance, Load, RouterZ
from moe.gates.named import GATES
from moe.gates.scores import SIGMOID, SOFTMAX
from moe.gates.selections import Ask, Chosen

__all__ = [
    "GATES", "RULES", "SIGMOID", "SOFTMAX", "Ask", "Balance", "Chosen", "Gate", "Gated",
    "Importance", "Load", "RouterZ",
]  # fmt: skip
