"""A training step as a list of actions: what computes, what sends, and what is kept when."""

from parallel.schedule.actions import Action, one_forward_one_backward
from parallel.schedule.lowering import lower

__all__ = ["Action", "lower", "one_forward_one_backward"]
