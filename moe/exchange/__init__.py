"""Exchange: which row goes to which rank of a team, and the messages that take it there.

An exchange takes rows to the experts of other ranks, lets these compute, and brings rows back.
"""

from moe.exchange.buffers import Received, Rows, SendBuffer
from moe.exchange.exchange import Exchange, SavedExchange
from moe.exchange.experts import Experts, Half, both_halves, first_half
from moe.exchange.loads import ALGORITHM, divisions, rows_to_ranks, start_loads
from moe.exchange.parts import Part, dropless, padded
from moe.exchange.payload import PAYLOADS, form_of
from moe.exchange.team import Team

__all__ = [
    "ALGORITHM",
    "PAYLOADS",
    "Exchange",
    "Experts",
    "Half",
    "Part",
    "Received",
    "Rows",
    "SavedExchange",
    "SendBuffer",
    "Team",
    "both_halves",
    "divisions",
    "dropless",
    "first_half",
    "form_of",
    "padded",
    "rows_to_ranks",
    "start_loads",
]
