"""The lists of PyTorch's pipeline schedules, action by action.

Collected where torch is installed (`conftest.py`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs

from parallel.pipeline import SCHEDULES, make, read_csv, with_messages, write_csv
from parallel.pipeline.actions import Action, Forward
from parallel.pipeline.text import parse_row

SIZES = [(2, 4), (2, 8), (4, 8), (4, 12), (3, 6), (5, 10)]


def stage(index: int, num_stages: int, num_ranks: int) -> Any:
    """All that a schedule asks of a stage before it runs."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=num_stages,
        group_size=num_ranks,
        group_rank=0,
        group=None,
        device=torch.device("cpu"),
        is_first=index == 0,
        is_last=index == num_stages - 1,
        submod=torch.nn.Identity(),
        has_backward=False,
    )


def order(kind: Any, p: int, m: int, stages: tuple[int, ...]) -> list[list[Action]]:
    """Their lists of each rank, without idle cells; `stages` are those of rank 0."""
    num_stages = len(stages) * p
    of_rank = [stage(i, num_stages, p) for i in stages]
    is_single = issubclass(kind, theirs.PipelineScheduleSingle)
    schedule = kind(of_rank[0] if is_single else of_rank, m)
    lists = getattr(schedule, "pipeline_order", None) or schedule._get_pipeline_order()
    return [parse_row(str(x) for x in lists[rank] if x is not None) for rank in range(p)]


def ours(name: str, p: int, m: int) -> list[list[Action]]:
    return [list(row) for row in make(name, p, m).actions]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_is_pytorchs_action_by_action(p: int, m: int) -> None:
    assert ours("gpipe", p, m) == order(theirs.ScheduleGPipe, p, m, (0,))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_one_forward_one_backward_is_pytorchs_action_by_action(p: int, m: int) -> None:
    """torch 2.13 counts the forwards of the last rank from 1: it says mF, which does not exist."""
    found = order(theirs.Schedule1F1B, p, m, (0,))
    last = [replace(x, micro_batch=x.micro_batch - isinstance(x, Forward)) for x in found[-1]]
    is_faulty = Forward(p - 1, m) in found[-1]
    assert ours("1f1b", p, m) == [*found[:-1], last if is_faulty else found[-1]]


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 3), (3, 5), (4, 6), (5, 2)])
def test_interleaved_is_pytorchs_action_by_action(p: int, m: int) -> None:
    """With fewer micro-batches than ranks too, and in rounds of more micro-batches than ranks."""
    found = order(theirs.ScheduleInterleaved1F1B, p, m, (0, p))
    assert ours("interleaved", p, m) == found


def test_interleaved_refuses_what_pytorchs_refuses() -> None:
    for p, m in product(range(1, 6), range(1, 13)):
        try:
            order(theirs.ScheduleInterleaved1F1B, p, m, (0, p))
        except ValueError:
            with pytest.raises(ValueError, match="rounds of equally many"):
                make("interleaved", p, m)
        else:
            make("interleaved", p, m)


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 3), (3, 5), (4, 6), (5, 2)])
def test_zero_bubble_with_the_memory_of_1f1b_is_pytorchs_action_by_action(p: int, m: int) -> None:
    """Theirs may have several stages on a rank; ZB-H1 of the paper has one."""
    assert ours("zb-h1", p, m) == order(theirs.ScheduleInterleavedZeroBubble, p, m, (0,))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zero_bubble_in_a_v_is_pytorchs_action_by_action(p: int, m: int) -> None:
    assert ours("zb-v", p, m) == order(theirs.ScheduleZBVZeroBubble, p, m, (0, 2 * p - 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_dualpipe_v_is_pytorchs_action_by_action(p: int, m: int) -> None:
    found = order(theirs.ScheduleDualPipeV, p, m, (0, 2 * p - 1))
    assert ours("dualpipe-v", p, m) == found


def test_a_file_of_pytorch_is_read(tmp_path: Path) -> None:
    kind: Any = theirs.ScheduleDualPipeV
    schedule = kind([stage(0, 4, 2), stage(3, 4, 2)], 4)
    schedule._dump_csv(str(tmp_path / "theirs.csv"), "compute_only")
    assert read_csv(tmp_path / "theirs.csv").actions == make("dualpipe-v", 2, 4).actions


def test_pytorch_reads_our_file(tmp_path: Path) -> None:
    write_csv(make("v-half", 2, 4).actions, tmp_path / "ours.csv")
    kind: Any = theirs.ScheduleDualPipeV
    schedule = kind([stage(0, 4, 2), stage(3, 4, 2)], 4)
    schedule._load_csv(str(tmp_path / "ours.csv"), "compute_only")
    found = [parse_row(map(str, schedule.pipeline_order[rank])) for rank in range(2)]
    assert found == ours("v-half", 2, 4) != ours("dualpipe-v", 2, 4)


WITH_ONE_RANK_OF_A_STAGE = [name for name in SCHEDULES if name[:4] not in ("dual", "pipe")]


@pytest.mark.parametrize("name", WITH_ONE_RANK_OF_A_STAGE)
def test_pytorchs_simulation_runs_our_lists_with_messages_to_the_end(name: str) -> None:
    """It knows neither pairs that overlap, nor two ranks of one stage, nor updates."""
    schedule = make(name, 4, 8)
    lists = {
        rank: [theirs._Action.from_str(str(x)) for x in row]
        for rank, row in enumerate(with_messages(schedule))
    }
    place = [schedule.ranks_of(stage)[0] for stage in range(schedule.num_stages)]
    found = theirs._simulate_comms_compute(lists, place.__getitem__, schedule.num_stages)
    for rank, row in lists.items():
        assert [action for action in found[rank] if action is not None] == row


def test_pytorchs_simulation_stops_at_lists_that_deadlock() -> None:
    lists = {
        rank: [theirs._Action.from_str(str(x)) for x in row]
        for rank, row in enumerate(with_messages(make("1f1b", 2, 4)))
    }
    receive = theirs._Action.from_str("0RECV_B3")
    lists[0].remove(receive)
    lists[0].insert(lists[0].index(theirs._Action.from_str("0SEND_F3")), receive)
    with pytest.raises(ValueError, match="not progressing"):
        theirs._simulate_comms_compute(lists, [0, 1].__getitem__, 2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-v"])
def test_pytorchs_pass_sends_the_same_messages(name: str) -> None:
    """In another order, because theirs are never blocked by a send."""
    schedule = make(name, 4, 8)
    place = {stage: schedule.rank_of(stage, 0) for stage in range(schedule.num_stages)}
    given = {
        rank: [theirs._Action.from_str(str(x)) for x in row]
        for rank, row in enumerate(schedule.actions)
    }
    found = theirs._add_send_recv(given, place.__getitem__, schedule.num_stages)
    for rank, row in enumerate(with_messages(schedule)):
        assert sorted(map(str, row)) == sorted(map(str, found[rank]))
