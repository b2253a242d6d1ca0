"""Layouts of large training runs: memory, traffic and time, by the formulas that small runs check.

Nothing is allocated, computed or sent: `cost_of` asks the layers of a model what they would keep
and send on a rank of a mesh that does not exist.
"""

from parallel.plan.cost import Cost, cost_of
from parallel.plan.layouts import Job, Layout, Machine, layouts_for

__all__ = ["Cost", "Job", "Layout", "Machine", "cost_of", "layouts_for"]
