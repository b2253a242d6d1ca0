"""The command that trains, as parts that the commands of other models use.

The commands of other models, such as `python -m moe.train`, add options to its parser, and hand
`train` a function that returns the `ModelSpec` of their model.
"""

from parallel.commands.models import ModelSpec, dense_spec, gpt_options
from parallel.commands.options import training_parser
from parallel.commands.program import print_check, print_verdict, train
from parallel.commands.rank_report import RankReport, gather_reports
from parallel.commands.ranks import InvalidRun, on_ranks, preparing, running

__all__ = [
    "InvalidRun",
    "ModelSpec",
    "RankReport",
    "dense_spec",
    "gather_reports",
    "gpt_options",
    "on_ranks",
    "preparing",
    "print_check",
    "print_verdict",
    "running",
    "train",
    "training_parser",
]
