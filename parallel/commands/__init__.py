"""The command that trains, as parts that the commands of other models use.

The commands of other models, such as `ring moe train`, add options to its parser, and hand
`train` a function that returns the `ModelSpec` of their model.
"""

from parallel.commands.models import ModelSpec, dense_spec, gpt_options
from parallel.commands.options import add_training_options
from parallel.commands.program import print_check, print_verdict, train
from parallel.commands.rank_report import RankReport, gather_reports
from parallel.commands.ranks import on_ranks, running
from parallel.commands.tables import print_rank_reports, print_traffic, training_progress

__all__ = [
    "ModelSpec",
    "RankReport",
    "add_training_options",
    "dense_spec",
    "gather_reports",
    "gpt_options",
    "on_ranks",
    "print_check",
    "print_rank_reports",
    "print_traffic",
    "print_verdict",
    "running",
    "train",
    "training_progress",
]
