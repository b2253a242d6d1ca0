"""Programs: a call of known sizes, as a table of integers that any executor can run.

A schedule says which blocks are sent; a program says which bytes of which buffer.
"""

from collectives.programs.lanes import Lanes, num_lanes
from collectives.programs.placement import passing_blocks
from collectives.programs.program import (
    BUFFERS,
    INPUT,
    OUTPUT,
    SCRATCH,
    CallSpec,
    Direct,
    Kind,
    Program,
    Row,
    assembled,
    compile_call,
)
from collectives.programs.steps import (
    Aliasing,
    Combine,
    CountOfEachBlock,
    Counts,
    Lane,
    Message,
    Move,
    OwnCounts,
    Step,
)

__all__ = [
    "BUFFERS",
    "INPUT",
    "OUTPUT",
    "SCRATCH",
    "Aliasing",
    "CallSpec",
    "Combine",
    "CountOfEachBlock",
    "Counts",
    "Direct",
    "Kind",
    "Lane",
    "Lanes",
    "Message",
    "Move",
    "OwnCounts",
    "Program",
    "Row",
    "Step",
    "assembled",
    "compile_call",
    "num_lanes",
    "passing_blocks",
]
