"""Combinations of layouts, sharding, schedules and places that once went wrong."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from parallel import Sharding
from parallel.rank_report import differences
from tests.parallel.layouts import Setup


def axes_of(**sizes: int) -> tuple[tuple[str, int], ...]:
    return tuple(sizes.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_weight_gradients_of_a_divided_table_need_no_values(stage: int) -> None:
    """Of a W under ZeRO-3, which gathers no parameters; ZeRO-2 is the control, with values."""
    setup = Setup(
        axes_of(pipe=2, data=2, tensor=2), "zb-h1", sharding=partial(Sharding.zero, stage),
        model=(("is_tied", True),),
    )  # fmt: skip
    ends = setup.run()
    np.testing.assert_allclose(ends[0].losses, setup.alone().losses, rtol=0, atol=1e-12)
    assert differences([end.report for end in ends]) == []
    assert ends[0].table is not None and ends[0].table.check()
