"""What layers send themselves, in each group of ranks, and which groups a part of a model leads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from parallel.accounts import PredictedCall
from parallel.layout import RankView
from parallel.mesh import Mesh


def in_groups(
    calls: Iterable[PredictedCall], mesh: Mesh, rank: int, *phases: str
) -> Iterator[PredictedCall]:
    """Yield the calls of a layer by the groups whose first rank is `rank`.

    A call that names its groups keeps them.  The phases of calls are inside of `phases`.
    """
    for call in calls:
        along = call.axis.split(",")
        groups = call.groups or tuple(group for group in mesh.ranks(along) if group[0] == rank)
        if groups:
            phase = "/".join(filter(None, (*phases, call.phase)))
            yield replace(call, phase=phase, groups=groups)


def led_by(view: RankView, calls: Iterable[PredictedCall]) -> Iterator[PredictedCall]:
    """Yield the calls by the groups whose first rank has this part of the model."""
    part_of, mine = view.layout.model_part, view.model_part
    for call in calls:
        groups = tuple(group for group in call.groups or () if part_of(group[0]) == mine)
        if groups:
            yield replace(call, groups=groups)
