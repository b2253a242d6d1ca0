"""Transformers for images, some of whose MLPs are mixtures of experts: V-MoE and Swin-MoE.

``python -m examples.images`` trains them on shapes that it draws.
"""

from examples.images.models import swin_moe, v_moe
from examples.images.shapes import CLASSES, batch

__all__ = ["CLASSES", "batch", "swin_moe", "v_moe"]
