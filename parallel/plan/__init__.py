"""Layouts of large training runs: memory, traffic and time, by the formulas that small runs check.

Nothing is allocated, computed or sent: `cost_of` asks the layers of a model what they would keep
and send on a rank of a mesh that does not exist.
"""

from parallel.plan.candidates import Candidate, Job, Machine, candidates_for
from parallel.plan.cost import Cost, cost_of, forward_flops

__all__ = ["Candidate", "Cost", "Job", "Machine", "candidates_for", "cost_of", "forward_flops"]
