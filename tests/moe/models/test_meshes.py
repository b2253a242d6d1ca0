"""The five layouts of the Switch Transformer: who has which rows and which weights."""

from __future__ import annotations

import pytest

from moe import layout
from moe.models.meshes import LAYOUTS
from tests.moe.models.test_training import Mixture, check, setup_of

ROWS = {"data": 4, "model": 1, "model-data": 2, "expert-data": 4, "expert-model-data": 2}
WEIGHTS = {"data": 1, "model": 4, "model-data": 2, "expert-data": 4, "expert-model-data": 4}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.slow
def test_ranks_divide_rows_and_weights_as_the_paper_says(name: str) -> None:
    """4 ranks train as one rank does; the paper's figure says how many parts there are."""
    ends = check(setup_of(Mixture("switch"), **layout(name, 4, 2)))
    parts = {end.trainer.batch_part for end in ends}
    assert len(parts) == ROWS[name]
    up = "block1.mlp.moe.experts.up.weight"
    models = [end.trainer.model for end in ends]
    boxes = {model.specs[up].box(model.mesh) for model in models}
    assert len(boxes) == WEIGHTS[name]


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no layout 'all'; choose from data, model"):
        layout("all", 4)
    with pytest.raises(ValueError, match="3 ranks for each weight do not divide 4 ranks"):
        layout("model-data", 4, 3)
