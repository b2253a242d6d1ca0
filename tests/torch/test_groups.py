"""Groups of ranks: who makes them, what they compute, their options, and their ends."""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import collectives
from collectives.torch import Options, versions
from collectives.torch.registry import backend_of
from tests.torch.groups import default_group
from tests.torch.tensors import all_drawn, check, combined, drawn

pytestmark = pytest.mark.mpi


def check_sum(members: list[int], group: dist.ProcessGroup | None = None) -> None:
    """An all-reduce in a group must give the sum over its members, on each of them."""
    if dist.get_rank() in members:
        tensor = drawn(dist.get_rank())
        dist.all_reduce(tensor, group=group)
        check(tensor, combined("SUM", [drawn(rank) for rank in members]))


# Which ranks


def test_a_group_of_some_ranks_leaves_the_others_out(ranks: range) -> None:
    members = [0, len(ranks) - 1]
    group = dist.new_group(members)
    check_sum(members, group)
    if dist.get_rank() in members:
        assert dist.get_backend(group) == "ring"
        assert dist.get_process_group_ranks(group) == members
        assert dist.get_rank(group) == members.index(dist.get_rank())
        assert dist.get_world_size(group) == 2
        tensor = drawn(dist.get_rank())
        dist.broadcast(tensor, members[1], group=group)  # the root is a rank of the job
        check(tensor, drawn(members[1]))
    else:
        assert group is dist.GroupMember.NON_GROUP_MEMBER


def test_a_group_orders_its_ranks_as_it_is_told(ranks: range) -> None:
    members = list(reversed(ranks))
    group = dist.new_group(members, use_local_synchronization=True)
    parts = [torch.zeros(3, 2) for _ in ranks]
    dist.all_gather(parts, drawn(dist.get_rank()), group=group)
    wanted = [drawn(rank) for rank in dist.get_process_group_ranks(group)]
    for part, one in zip(parts, wanted, strict=True):
        check(part, one)


def test_groups_that_share_ranks_do_not_disturb_each_other(ranks: range) -> None:
    p, mine = len(ranks), dist.get_rank()
    pairs = [sorted({i, (i + 1) % p}) for i in ranks]
    groups = [dist.new_group(pair) for pair in pairs]
    tensors, works = [drawn(mine) for _ in groups], []
    for tensor, pair, group in zip(tensors, pairs, groups, strict=True):
        if mine in pair:
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
    check_sum([*ranks])  # in between
    for work in works:
        work.wait()
    for tensor, pair in zip(tensors, pairs, strict=True):
        if mine in pair:
            check(tensor, combined("SUM", [drawn(rank) for rank in pair]))


def test_only_its_members_make_a_group(ranks: range) -> None:
    """The other ranks come only when the group has been made and used."""
    members = [0, len(ranks) - 1]
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() in members:
        for _ in range(3):
            group = dist.new_group(members, use_local_synchronization=True)
            check_sum(members, group)
        store.set(f"done {dist.get_rank()}", "yes")
    else:
        store.wait([f"done {rank}" for rank in members], timedelta(seconds=20))
    dist.barrier()


def test_many_groups_can_be_made_used_and_destroyed(ranks: range) -> None:
    for i in range(40):
        members = sorted({i % len(ranks), (i // 2) % len(ranks)})
        group = dist.new_group(members)
        check_sum(members, group)
        if dist.get_rank() in members and i % 2:  # the others end with the default group
            dist.destroy_process_group(group)


def test_subgroups_of_equal_size_are_made(ranks: range) -> None:
    group, groups = dist.new_subgroups(1)
    assert len(groups) == len(ranks)
    check_sum([dist.get_rank()], group)
    group, _ = dist.new_subgroups_by_enumeration([[*ranks[:1]], [*ranks[1:]]])
    check_sum([0] if dist.get_rank() == 0 else [*ranks[1:]], group)


def test_a_mesh_of_one_dimension_has_the_ranks_of_the_job(ranks: range) -> None:
    mesh = init_device_mesh("cpu", (len(ranks),), mesh_dim_names=("data",))
    check_sum([*ranks], mesh.get_group("data"))


def test_a_mesh_of_two_dimensions_has_a_group_for_each(ranks: range) -> None:
    num_rows = 2 if len(ranks) % 2 == 0 else 1
    num_columns = len(ranks) // num_rows
    mesh = init_device_mesh("cpu", (num_rows, num_columns), mesh_dim_names=("replica", "shard"))
    row, column = divmod(dist.get_rank(), num_columns)
    check_sum([row * num_columns + j for j in range(num_columns)], mesh.get_group("shard"))
    check_sum([i * num_columns + column for i in range(num_rows)], mesh.get_group("replica"))
    assert dist.get_backend(mesh["shard"].get_group()) == "ring"


def test_a_group_can_be_split(ranks: range) -> None:
    if versions.VERSION < (2, 15):  # of older versions only NCCL can
        return
    parts = [[*ranks[:1]], [*ranks[1:]]]
    group = dist.split_group(split_ranks=parts)
    mine = next(part for part in parts if dist.get_rank() in part)
    assert dist.get_process_group_ranks(group) == mine
    check_sum(mine, group)


def test_a_group_can_shrink_without_the_ranks_that_leave(ranks: range) -> None:
    members, mine = [*ranks], dist.get_rank()
    group = dist.new_group(members)
    if not versions.HAS_BACKENDS:  # before 2.14 PyTorch can only use backends in C++ for it
        with pytest.raises(TypeError, match="shrink"):
            dist.shrink_group([members[-1]], group=group)
    elif mine < members[-1]:  # the last one leaves, and does not call it
        smaller = dist.shrink_group([members[-1]], group=group)
        check_sum(members[:-1], smaller)


# Together with other backends


def test_the_default_group_may_have_another_backend() -> None:
    with default_group("gloo") as ranks:
        members = [*ranks[1:]] or [0]
        group = dist.new_group(members, backend="ring")
        check_sum([*ranks])  # by Gloo
        check_sum(members, group)
        if dist.get_rank() in members:
            assert dist.get_backend(group) == "ring" and backend_of(group)
        with pytest.raises(ValueError, match='does not have the backend "ring"'):
            backend_of()


def test_a_group_may_have_another_backend_than_the_default_group(ranks: range) -> None:
    check_sum([*ranks], dist.new_group(backend="gloo"))
    check_sum([*ranks])


# Options


def algorithm_of(group: dist.ProcessGroup | None = None) -> str:
    """The algorithm that the ledger has of an all-reduce in a group."""
    with backend_of(group).communicator.record() as ledger:
        dist.all_reduce(torch.ones(5), group=group)
    (algorithm,) = {row.algorithm for row in ledger.rows()}
    return algorithm


def test_a_group_has_the_algorithms_of_its_options_or_of_the_default_group() -> None:
    with default_group(pg_options=Options(algorithms={"all_reduce": "ring"})) as ranks:
        own = Options(algorithms={"all_reduce": "reduce_broadcast"})
        assert algorithm_of() == "ring"
        assert algorithm_of(dist.new_group([*ranks])) == "ring"
        assert algorithm_of(dist.new_group([*ranks], pg_options=own)) == "reduce_broadcast"


def test_an_unknown_collective_or_algorithm_is_refused() -> None:
    for unknown in ({"all_reduce": "magic"}, {"magic": "ring"}):
        with pytest.raises(ValueError, match="magic"):
            Options(algorithms=unknown)


def test_an_unknown_option_of_an_algorithm_or_check_is_refused() -> None:
    with pytest.raises(ValueError, match="knows no option 'radix'"):
        Options(algorithms={"all_reduce": "ring(radix=3)"})
    with pytest.raises(ValueError, match="needs shards=4, and an x with shards"):
        Options(algorithms={"all_reduce": "invariant(shards=4)"})
    with pytest.raises(ValueError, match="check must be True, False, None or 'finite', not 'yes'"):
        Options(check="yes")


def test_only_the_default_group_takes_the_option_check(ranks: range) -> None:
    with pytest.raises(ValueError, match="check is an option of the default group"):
        dist.new_group([*ranks], pg_options=Options(check=True))


def test_options_of_another_backend_are_refused(ranks: range) -> None:
    with pytest.raises(TypeError, match=r"pg_options must be collectives\.torch\.Options"):
        dist.new_group([*ranks], pg_options=versions.options_with("gloo", None))


def test_checked_mode_finds_ranks_that_make_different_calls() -> None:
    with default_group(pg_options=Options(check=True)) as ranks:
        check_sum([*ranks])
        size = 5 if dist.get_rank() == 0 else 6
        group = dist.new_group([*ranks])
        for either in (None, group):
            with pytest.raises(dist.DistBackendError, match="rank"):
                dist.all_reduce(torch.ones(size), group=either)
        check_sum([*ranks], group)
        check_sum([*ranks])


# Ends


def test_default_groups_may_follow_one_another(world: collectives.Communicator) -> None:
    for _ in range(2):
        dist.init_process_group("ring")  # the ranks find each other without a store
        check_sum([*range(world.size)])
        dist.destroy_process_group()
        assert not dist.is_initialized()


def test_the_default_group_ends_with_calls_that_nobody_has_waited_for(ranks: range) -> None:
    tensor = drawn(dist.get_rank())
    dist.all_reduce(tensor, async_op=True)
    dist.destroy_process_group()
    check(tensor, combined("SUM", [drawn(rank) for rank in ranks]))


def test_a_monitored_barrier_waits_for_all_ranks(ranks: range) -> None:
    if not versions.HAS_BACKENDS:  # before 2.14 PyTorch has it for Gloo only
        return
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == len(ranks) - 1:
        time.sleep(0.05)
        store.set("came", "yes")
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    assert store.check(["came"])


def test_the_sum_of_other_ranks_is_noticed(ranks: range) -> None:
    """Negative control: the inputs differ, so that a sum says whose it is."""
    sums = [combined("SUM", all_drawn()[: i + 1]) for i in ranks]
    for one, other in pairwise(sums):
        with pytest.raises(AssertionError):
            check(one, other)
