"""Students: a smaller model with experts learns from a larger one that was trained before.

``python -m examples.students`` trains one whose teacher ``python -m examples.images`` has saved.
"""

from examples.students.distillation import Distillation, distilled
from examples.students.teacher import Teacher

__all__ = ["Distillation", "Teacher", "distilled"]
