"""Small transformers for images, some of whose MLPs are mixtures of experts.

Each patch of an image is a token, which its experts compute; an image has one target, its class.
`moe.images.shapes` draws images to train on.
"""

from moe.images.shapes import CLASSES, batch
from moe.images.swin import swin_moe
from moe.images.vision import v_moe

__all__ = ["CLASSES", "batch", "swin_moe", "v_moe"]
