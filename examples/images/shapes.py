"""Images to train on: drawn shapes, which do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from parallel import text

Values: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def disc(u: Values, v: Values) -> Values:
    """Return how far points (u, v) are from the middle of a disc of radius 1."""
    distance: Values = np.hypot(u, v)
    return distance


def square(u: Values, v: Values) -> Values:
    """Return the same for a square, whose edge is where it is 1."""
    distance: Values = np.maximum(abs(u), abs(v)) / 0.85
    return distance


def plus(u: Values, v: Values) -> Values:
    """Return the same for two crossed bars."""
    distance: Values = np.maximum(np.minimum(abs(u), abs(v)) / 0.3, square(u, v))
    return distance


def cross(u: Values, v: Values) -> Values:
    """Return the same for two bars that cross at the diagonals."""
    return plus((u + v) / 2**0.5, (u - v) / 2**0.5)


def ring(u: Values, v: Values) -> Values:
    """Return the same for a disc with a hole."""
    distance: Values = np.where(disc(u, v) < 0.55, 2.0, disc(u, v))
    return distance


def frame(u: Values, v: Values) -> Values:
    """Return the same for a square with a hole."""
    distance: Values = np.where(square(u, v) < 0.55, 2.0, square(u, v))
    return distance


SHAPES: dict[str, Callable[[Values, Values], Values]] = {
    "disc": disc,
    "square": square,
    "plus": plus,
    "cross": cross,
    "ring": ring,
    "frame": frame,
}
CLASSES = tuple(SHAPES)  # their names, in order


def draw(rng: np.random.Generator, name: str, size: int, channels: int = 1) -> Integers:
    """Return an image of a shape: int64 (`size`, `size`, `channels`) from 0 to 255.

    It has any radius from a quarter to almost half of the `size`, is anywhere inside, and differs
    in brightness from what is behind it; there is noise everywhere.
    """
    radius = rng.uniform(0.25, 0.45) * size
    row, column = rng.uniform(radius, size - radius, 2)
    v, u = (np.indices((size, size)) + 0.5 - np.array([row, column])[:, None, None]) / radius
    inside = SHAPES[name](u, v)[:, :, None] <= 1
    dark, bright = rng.uniform(0, 80, channels), rng.uniform(150, 255, channels)
    noise = rng.normal(0, 8, (size, size, channels))
    return np.clip(np.where(inside, bright, dark) + noise, 0, 255).astype(np.int64)


def batch(
    *,
    seed: int,
    step: int,
    batch_size: int,
    image_size: int = 16,
    channels: int = 1,
    rank: int = 0,
    num_ranks: int = 1,
) -> tuple[Integers, Integers]:
    """Return one rank's rows of the batch of a step: images, and which shapes they show.

    Images are int64 (rows, `image_size`, `image_size`, `channels`) from 0 to 255, and targets int64
    (rows, 1), indices of `CLASSES`.  An image is a function of `seed`, `step` and its row in the
    whole batch of `batch_size` rows; `num_ranks` divide these, and `rank` gets its share.  Raises
    ValueError if a rank would have no rows.

    Examples
    --------
    >>> from examples import images
    >>> pixels, targets = images.batch(seed=0, step=0, batch_size=8, rank=1, num_ranks=3)
    >>> pixels.shape, [images.CLASSES[i] for i in targets[:, 0]]
    ((3, 16, 16, 1), ['ring', 'square', 'frame'])
    """
    rows = range(batch_size)[text.share(batch_size, num_ranks, rank)]
    images = np.empty((len(rows), image_size, image_size, channels), np.int64)
    targets = np.empty((len(rows), 1), np.int64)
    for i, row in enumerate(rows):
        rng = np.random.default_rng([seed, step, row])
        targets[i] = rng.integers(len(CLASSES))
        images[i] = draw(rng, CLASSES[targets[i, 0]], image_size, channels)
    return images, targets
