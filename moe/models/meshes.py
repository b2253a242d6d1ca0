"""The five meshes of the Switch Transformer: how ranks divide the batch and the weights.

Fedus et al. 2021 (Switch Transformer), section 5 and figure 9: of n x m ranks, n have different
parts of the batch and m different parts of each weight; experts are on different ranks of the n, or
each rank has all of them.
"""

from __future__ import annotations

from collections.abc import Callable

LAYOUTS: dict[str, Callable[[int, int], dict[str, int]]] = {
    "data": lambda n, m: {"data": n * m},
    "model": lambda n, m: {"tensor": n * m},
    "model-data": lambda n, m: {"data": n, "tensor": m},
    "expert-data": lambda n, m: {"expert": n * m},
    "expert-model-data": lambda n, m: {"expert": n, "tensor": m},
}


def layout(name: str, num_ranks: int, num_model: int = 1) -> dict[str, int]:
    """Return the axes of a mesh of `num_ranks` for the layout of this `name`.

    `num_model` ranks divide each weight, in the layouts in which some do and others do not.
    Raises ValueError for another name, and if `num_model` does not divide the ranks.

    Examples
    --------
    >>> from moe import layout
    >>> layout("expert-model-data", 8, 2)
    {'expert': 4, 'tensor': 2}
    """
    if name not in LAYOUTS:
        raise ValueError(f"there is no layout {name!r}; choose from {', '.join(LAYOUTS)}")
    if num_model < 1 or num_ranks % num_model:
        raise ValueError(f"{num_model} ranks for each weight do not divide {num_ranks} ranks")
    return LAYOUTS[name](num_ranks // num_model, num_model)
