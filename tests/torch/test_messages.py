"""Messages from rank to rank: every dtype, tags, from any rank, and several at once."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from collectives.torch.versions import HAS_BACKENDS
from tests.torch.tensors import DTYPES, all_drawn, blank, blanks, check, check_all, drawn

pytestmark = pytest.mark.mpi


def neighbours(ranks: range) -> tuple[int, int, int]:
    """This rank, and those before and after it in a ring."""
    mine = dist.get_rank()
    return mine, (mine - 1) % len(ranks), (mine + 1) % len(ranks)


def test_messages_of_every_dtype_go_around_a_ring(ranks: range) -> None:
    mine, left, right = neighbours(ranks)
    for dtype in DTYPES:
        everyones = all_drawn(dtype=dtype)
        received = blank(everyones[left])
        sending = dist.isend(everyones[mine], right)
        assert dist.recv(received, left) == left
        sending.wait()
        check(received, everyones[left])


def test_a_blocking_send_meets_a_receive_that_starts_first_or_last(ranks: range) -> None:
    mine = dist.get_rank()
    for first in (0, 1):
        received = torch.zeros(2, 3).t()  # not contiguous
        if mine == 0:
            time.sleep(0.01 * first)
            dist.send(drawn(0), 1)
        elif mine == 1:
            time.sleep(0.01 * (1 - first))
            dist.recv(received, 0)
            check(received, drawn(0))


def test_a_receive_from_any_rank_says_who_sent(ranks: range) -> None:
    everyones = all_drawn()
    for receiver in ranks:
        if dist.get_rank() != receiver:
            dist.send(everyones[dist.get_rank()], receiver)
            continue
        by_source = {}
        for _ in range(len(ranks) - 1):
            tensor = blank(everyones[0])
            source = dist.recv(tensor)
            by_source[source] = tensor
        assert sorted(by_source) == [rank for rank in ranks if rank != receiver]
        for source, tensor in by_source.items():
            check(tensor, everyones[source])


def test_a_receive_from_any_rank_of_a_group_says_the_rank_of_the_job(ranks: range) -> None:
    last = len(ranks) - 1
    group = dist.new_group([0, last][: len(ranks)])
    if dist.get_rank() == last and last > 0:
        dist.send(drawn(last), 0, group=group)
    elif dist.get_rank() == 0 and last > 0:
        received = blank(drawn(last))
        assert dist.recv(received, group=group) == last
        check(received, drawn(last))


def test_tags_choose_among_the_messages_of_a_rank(ranks: range) -> None:
    mine, left, right = neighbours(ranks)
    tensors = {tag: drawn(mine, seed=tag) for tag in (5, 3, 8)}
    sending = [dist.isend(tensor, right, tag=tag) for tag, tensor in tensors.items()]
    for tag in (3, 8, 5):
        received = blank(drawn(left))
        dist.recv(received, left, tag=tag)
        check(received, drawn(left, seed=tag))
    for work in sending:
        work.wait()


def test_tags_choose_among_the_messages_of_all_ranks(ranks: range) -> None:
    mine = dist.get_rank()
    if mine == 0:
        for tag in (2, 1):
            for _ in ranks[1:]:
                received = blank(drawn(0))
                source = dist.recv(received, tag=tag)
                check(received, drawn(source, seed=tag))
    else:
        sending = [dist.isend(drawn(mine, seed=tag), 0, tag=tag) for tag in (1, 2)]
        for work in sending:
            work.wait()


def test_messages_of_the_same_tag_stay_in_order(ranks: range) -> None:
    mine, left, right = neighbours(ranks)
    sending = [dist.isend(drawn(mine, seed=i), right) for i in range(5)]
    received = blanks([drawn(left)] * 5)
    receiving = [dist.irecv(tensor, left) for tensor in received]
    for work in (*sending, *receiving):
        work.wait()
    check_all(received, [drawn(left, seed=i) for i in range(5)])


def test_a_batch_of_messages_goes_around_a_ring(ranks: range) -> None:
    mine, left, right = neighbours(ranks)
    received = [blank(drawn(left)), blank(drawn(right))]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, received[0], left),
            dist.P2POp(dist.irecv, received[1], right, tag=1),
            dist.P2POp(dist.isend, drawn(mine), left, tag=1),
            dist.P2POp(dist.isend, drawn(mine), right),
        ]
    )
    for work in works:
        work.wait()
    check_all(received, [drawn(left), drawn(right)])


def test_a_batch_has_messages_of_a_rank_to_itself_too(ranks: range) -> None:
    mine, left, right = neighbours(ranks)
    received = blanks([drawn(mine)] * 4)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, drawn(mine, seed=1), mine),
            dist.P2POp(dist.isend, drawn(mine, seed=2), mine),
            dist.P2POp(dist.isend, drawn(mine, seed=3), mine, tag=5),
            dist.P2POp(dist.isend, drawn(mine), right),
            dist.P2POp(dist.irecv, received[2], mine, tag=5),
            dist.P2POp(dist.irecv, received[0], mine),
            dist.P2POp(dist.irecv, received[1], mine),
            dist.P2POp(dist.irecv, received[3], left),
        ]
    )
    for work in works:
        work.wait()
    check_all(received, [*(drawn(mine, seed=i) for i in (1, 2, 3)), drawn(left)])


@pytest.mark.parametrize("is_first", [True, False], ids=["send first", "receive first"])
def test_a_rank_sends_to_itself_without_a_batch(ranks: range, is_first: bool) -> None:
    mine, received = dist.get_rank(), torch.zeros(2, 3).t()  # not contiguous
    calls = [partial(dist.isend, drawn(mine), mine), partial(dist.irecv, received, mine)]
    works = [call() for call in (calls if is_first else calls[::-1])]
    for work in reversed(works):
        work.wait()
    check(received, drawn(mine))


def test_a_receive_from_any_rank_takes_a_message_of_its_own(ranks: range) -> None:
    mine, received = dist.get_rank(), blank(drawn(0))
    sending = dist.isend(drawn(mine), mine, tag=4)
    dist.irecv(received, tag=4).wait()
    sending.wait()
    check(received, drawn(mine))


def test_of_a_refused_batch_no_message_is_sent(ranks: range) -> None:
    """Before 2.14 PyTorch starts messages one by one: those before the refused one are sent."""
    mine, left, right = neighbours(ranks)
    received, other = torch.zeros(2), torch.zeros(2)
    with pytest.raises(ValueError, match="tag must be from 0"):
        dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, other, left),
                dist.P2POp(dist.isend, torch.full((2,), 9.0), right),
                dist.P2POp(dist.isend, torch.zeros(2), right, tag=-1),
            ]
        )
    works = [dist.irecv(received, left), dist.isend(torch.full((2,), mine + 1.0), right)]
    for work in works:
        work.wait()
    assert received.tolist() == 2 * [left + 1.0]
    assert other.tolist() == 2 * [0.0 if HAS_BACKENDS else 9.0]


@pytest.mark.parametrize("from_any", [False, True], ids=["from one rank", "from any rank"])
def test_messages_complete_without_a_wait(ranks: range, from_any: bool) -> None:
    mine, left, right = neighbours(ranks)
    received = torch.zeros(2, 3).t()
    receiving = dist.irecv(received, None if from_any else left)
    sending = dist.isend(drawn(mine), right)
    deadline = time.monotonic() + 10
    while not (receiving.is_completed() and sending.is_completed()):
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    check(received, drawn(left))
    dist.barrier()


def test_a_message_that_has_not_come_is_not_complete(ranks: range) -> None:
    """Negative control: `is_completed` does not say so of everything."""
    mine, left, right = neighbours(ranks)
    received = blank(drawn(left))
    works = [dist.irecv(received, left, tag=1)]
    assert not works[0].is_completed()
    dist.barrier()
    works.append(dist.isend(drawn(mine), right, tag=1))
    for work in works:
        work.wait()
    check(received, drawn(left))
