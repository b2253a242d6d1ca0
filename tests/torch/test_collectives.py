"""Every collective of torch.distributed gives what NumPy gives, for every dtype and layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torch.tensors import (
    DTYPES,
    FLOATS,
    ONLY_MOVED,
    OPS,
    Tensor,
    all_drawn,
    blank,
    blanks,
    check,
    check_all,
    combined,
    drawn,
    operator,
)

pytestmark = pytest.mark.mpi

SHAPES = [(), (1,), (5,), (2, 3), (0,), (3, 0)]


def my_rank() -> int:
    return dist.get_rank()


# Reductions


def all_multiples(num_ranks: int, dtype: torch.dtype, op: str) -> list[Tensor]:
    """What the ranks bring to a reduction; averages are whole numbers, too."""
    tensors = all_drawn((4,), dtype)
    return [tensor * num_ranks for tensor in tensors] if op == "AVG" else tensors


@pytest.mark.parametrize("op", OPS)
def test_all_reduce_serves_every_operator_on_every_dtype(ranks: range, op: str) -> None:
    for dtype in OPS[op][0]:
        everyones = all_multiples(len(ranks), dtype, op)
        tensor = everyones[my_rank()].clone()
        dist.all_reduce(tensor, operator(op))
        check(tensor, combined(op, everyones))


@pytest.mark.parametrize("op", OPS)
def test_reduce_serves_every_root(ranks: range, op: str) -> None:
    for root in ranks:
        for dtype in OPS[op][0]:
            everyones = all_multiples(len(ranks), dtype, op)
            tensor = everyones[my_rank()].clone()
            dist.reduce(tensor, root, operator(op))
            if my_rank() == root:
                check(tensor, combined(op, everyones))


@pytest.mark.parametrize("op", OPS)
def test_reduce_scatter_serves_every_operator(ranks: range, op: str) -> None:
    p, mine = len(ranks), my_rank()
    for dtype in OPS[op][0]:
        everyones = all_drawn((p, 4), dtype)
        if op == "AVG":
            everyones = [tensor * p for tensor in everyones]
        wanted = combined(op, everyones)[mine]
        output = blank(wanted)
        dist.reduce_scatter(output, list(everyones[mine]), operator(op))
        check(output, wanted)
        output = blank(wanted)
        dist.reduce_scatter_tensor(output, everyones[mine].flatten(), operator(op))
        check(output, wanted)


def test_reduce_scatter_serves_uneven_parts(ranks: range) -> None:
    mine = my_rank()
    shapes = [(rank, 2) for rank in ranks]  # rank 0 gets nothing
    everyones = [[drawn(r, shape, seed=i) for i, shape in enumerate(shapes)] for r in ranks]
    output = torch.zeros(shapes[mine])
    dist.reduce_scatter(output, everyones[mine])
    check(output, combined("SUM", [parts[mine] for parts in everyones]))


def test_reduce_scatter_may_write_into_a_part_of_its_own_input(ranks: range) -> None:
    p, mine = len(ranks), my_rank()
    everyones = all_drawn((p, 3))
    whole = everyones[mine].clone()
    dist.reduce_scatter_tensor(whole[mine], whole)
    check(whole[mine], combined("SUM", everyones)[mine])


def test_a_sum_may_be_of_what_is_multiplied_first(ranks: range) -> None:
    for dtype in FLOATS:
        for factor in (2.0, torch.tensor([3], dtype=dtype)):
            op = dist._make_nccl_premul_sum(factor)
            p, mine = len(ranks), my_rank()
            everyones = all_drawn((p, 3), dtype)
            wanted = combined("SUM", everyones) * factor
            brought = everyones[mine].clone()
            reduced = brought.clone()
            dist.all_reduce(reduced, op)
            check(reduced, wanted)
            part = blank(wanted[mine])
            dist.reduce_scatter_tensor(part, brought, op)
            check(part, wanted[mine])
            check(brought, everyones[mine])  # the input stays as it is
            reduced = brought.clone()
            dist.reduce(reduced, p - 1, op)
            if mine == p - 1:
                check(reduced, wanted)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # until numba is loaded
def test_an_average_of_float16_fits_where_a_sum_does_not(ranks: range) -> None:
    p, large = len(ranks), torch.full((3,), 60_000.0, dtype=torch.float16)
    averaged, root, scattered = large.clone(), large.clone(), blank(large)
    dist.all_reduce(averaged, dist.ReduceOp.AVG)
    dist.reduce(root, 0, dist.ReduceOp.AVG)
    dist.reduce_scatter(scattered, [large] * p, dist.ReduceOp.AVG)
    assert (large == 60_000).all()
    for average in (averaged, scattered, *([root] if my_rank() == 0 else [])):
        assert average.isfinite().all() and (average / 60_000 - 1).abs().max() < p * 2**-11
    dist.all_reduce(large)
    assert large.isinf().all()  # negative control


@pytest.mark.parametrize(("op", "dtype"), [("AVG", torch.int32), ("AVG", torch.bool)])
def test_averages_of_whole_numbers_are_refused(ranks: range, op: str, dtype: torch.dtype) -> None:
    with pytest.raises((TypeError, ValueError)):
        dist.all_reduce(drawn(0, dtype=dtype), operator(op))


@pytest.mark.parametrize("dtype", ONLY_MOVED, ids=str)
def test_what_can_only_be_moved_is_refused_by_reductions_before_anything_is_sent(
    ranks: range, dtype: torch.dtype
) -> None:
    p, whole = len(ranks), drawn(0, (len(ranks), 2), dtype)
    for reduction in (
        lambda: dist.all_reduce(whole),
        lambda: dist.reduce(whole, 0),
        lambda: dist.reduce_scatter(blank(whole[0]), list(whole)),
        lambda: dist.reduce_scatter_tensor(blank(whole[0]), whole),
    ):
        if my_rank() == p - 1:  # only here, so a message would find no receiver
            with pytest.raises(TypeError, match="can be sent, but not combined"):
                reduction()
    dist.barrier()


# Between a root and the others


def test_broadcast_serves_every_dtype_from_every_root(ranks: range) -> None:
    for root in ranks:
        for dtype in DTYPES:
            everyones = all_drawn(dtype=dtype)
            tensor = everyones[my_rank()].clone()
            dist.broadcast(tensor, root)
            check(tensor, everyones[root])


def test_gather_serves_every_dtype_to_every_root(ranks: range) -> None:
    for root in ranks:
        for dtype in DTYPES:
            everyones, is_root = all_drawn(dtype=dtype), my_rank() == root
            parts = blanks(everyones) if is_root else None
            dist.gather(everyones[my_rank()], parts, root)
            if parts is not None:
                check_all(parts, everyones)


def test_scatter_serves_every_dtype_from_every_root(ranks: range) -> None:
    for root in ranks:
        for dtype in DTYPES:
            everyones, is_root = all_drawn(dtype=dtype), my_rank() == root
            tensor = blank(everyones[0])
            dist.scatter(tensor, everyones if is_root else None, root)
            check(tensor, everyones[my_rank()])


# Among all ranks


def test_all_gather_serves_every_dtype(ranks: range) -> None:
    p = len(ranks)
    for dtype in DTYPES:
        everyones = all_drawn(dtype=dtype)
        mine, wanted = everyones[my_rank()], torch.stack(everyones)
        parts = blanks(everyones)
        dist.all_gather(parts, mine)
        check_all(parts, everyones)
        for shape in ((p, 3, 2), (p * 3, 2)):  # stacked, and one after the other
            whole = torch.zeros(shape, dtype=dtype)
            dist.all_gather_into_tensor(whole, mine)
            check(whole, wanted.reshape(shape))


def test_all_gather_serves_uneven_tensors(ranks: range) -> None:
    everyones = [drawn(rank, (rank, 2)) for rank in ranks]  # rank 0 has nothing
    parts = blanks(everyones)
    dist.all_gather(parts, everyones[my_rank()])
    check_all(parts, everyones)


def test_all_gather_may_be_in_place(ranks: range) -> None:
    everyones = all_drawn()
    whole = torch.zeros(len(ranks), 3, 2)
    whole[my_rank()] = everyones[my_rank()]
    dist.all_gather_into_tensor(whole, whole[my_rank()])
    check(whole, torch.stack(everyones))


def all_to_all_shapes(ranks: range, *, is_even: bool) -> list[list[tuple[int, int]]]:
    """The shape of what each rank sends to each; nothing is sent to some if it is uneven."""
    return [[(2 if is_even else (i + 2 * j) % 3, 2) for j in ranks] for i in ranks]


@pytest.mark.parametrize("is_even", [True, False], ids=["even", "uneven"])
def test_all_to_all_serves_every_dtype(ranks: range, is_even: bool) -> None:
    mine, shapes = my_rank(), all_to_all_shapes(ranks, is_even=is_even)
    for dtype in DTYPES:
        everyones = [[drawn(i, shapes[i][j], dtype, seed=j) for j in ranks] for i in ranks]
        wanted = [everyones[i][mine] for i in ranks]
        parts = blanks(wanted)
        dist.all_to_all(parts, everyones[mine])
        check_all(parts, wanted)


@pytest.mark.parametrize("is_even", [True, False], ids=["even", "uneven"])
def test_all_to_all_single_serves_every_dtype(ranks: range, is_even: bool) -> None:
    mine, shapes = my_rank(), all_to_all_shapes(ranks, is_even=is_even)
    to_each, from_each = shapes[mine], [row[mine] for row in shapes]
    in_splits, out_splits = [rows for rows, _ in to_each], [rows for rows, _ in from_each]
    for dtype in DTYPES:
        everyones = [[drawn(i, shapes[i][j], dtype, seed=j) for j in ranks] for i in ranks]
        wanted = torch.cat([everyones[i][mine] for i in ranks])
        brought = torch.cat(everyones[mine])
        output = blank(wanted)
        dist.all_to_all_single(output, brought, out_splits, in_splits)
        check(output, wanted)
        if is_even:  # then either side's sizes, or both, may be left to the backend
            for sizes in ((None, None), (out_splits, None), (None, in_splits)):
                output = blank(wanted)
                dist.all_to_all_single(output, brought, *sizes)
                check(output, wanted)


def test_one_side_of_an_all_to_all_may_be_divided_equally_and_the_other_not(ranks: range) -> None:
    """Rank 0 sends two rows to each; every other rank sends one."""
    mine = my_rank()
    num_rows = [2 if rank == 0 else 1 for rank in ranks]
    everyones = [[drawn(i, (num_rows[i], 3), seed=j) for j in ranks] for i in ranks]
    wanted = torch.cat([everyones[i][mine] for i in ranks])
    output = blank(wanted)
    dist.all_to_all_single(output, torch.cat(everyones[mine]), output_split_sizes=num_rows)
    check(output, wanted)


def test_nobody_leaves_a_barrier_before_all_have_come(ranks: range) -> None:
    for last in ranks:
        store = dist.distributed_c10d._get_default_store()
        if my_rank() == last:
            store.add(f"came {last}", 1)  # unlike `set`, it waits for the answer of the store
        dist.barrier()
        assert store.check([f"came {last}"])


# Several calls at once


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asynchronous"])
def test_coalesced_calls_give_the_results_of_single_ones(ranks: range, is_async: bool) -> None:
    p, mine = len(ranks), my_rank()
    rows = [all_drawn((p, i), seed=i) for i in range(1, 4)]
    wholes = [[torch.zeros(p * p, i), torch.zeros(p, i), torch.zeros(i)] for i in range(1, 4)]
    for kind in range(3):
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for row, (gathered, summed, scattered) in zip(rows, wholes, strict=True):
                if kind == 0:
                    dist.all_gather_into_tensor(gathered, row[mine])
                elif kind == 1:
                    dist.all_reduce(summed.copy_(row[mine]))
                else:
                    dist.reduce_scatter_tensor(scattered, row[mine])
        if is_async:
            manager.wait()
    for row, (gathered, summed, scattered) in zip(rows, wholes, strict=True):
        total = combined("SUM", row)
        check(gathered, torch.cat(row))
        check(summed, total)
        check(scattered, total[mine])


def test_messages_in_a_block_arrive_beside_a_barrier_and_waits(ranks: range) -> None:
    """Messages start when the block ends, or before what would wait for them."""
    mine, peer = my_rank(), my_rank() ^ 1
    received = blanks([drawn(0)] * 2)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        if peer in ranks:
            dist.isend(drawn(mine), peer)
            dist.irecv(received[0], peer).wait()
        dist.isend(drawn(mine), mine)
        dist.irecv(received[1], mine)
        dist.barrier()
    manager.wait()
    check(received[1], drawn(mine))
    if peer in ranks:
        check(received[0], drawn(peer))


class MistakeError(Exception):
    """What the blocks below raise."""


def an_error_of_the_program() -> None:
    dist.all_reduce(torch.ones(3))
    raise MistakeError


def a_call_that_is_refused() -> None:
    """At once, or when the block ends."""
    dist.all_reduce(torch.ones(3, dtype=torch.float8_e5m2))


def a_message_that_is_refused() -> None:
    dist.isend(torch.ones(3), my_rank(), tag=-1)


DEVICES = {"of one kind": None, "of any kind": torch.device("cpu")}


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize(
    "content", [an_error_of_the_program, a_call_that_is_refused, a_message_that_is_refused]
)
def test_a_block_that_raises_leaves_the_group_as_usable_as_before(
    ranks: range, content: Callable[[], None], device: torch.device | None
) -> None:
    block = dist._coalescing_manager(device=device)
    with pytest.raises((MistakeError, TypeError, ValueError)), block:
        content()
    check_that_calls_are_made()
    x = torch.full((2,), my_rank() + 1.0)
    with dist._coalescing_manager():
        dist.all_reduce(x)
    assert x.tolist() == 2 * [sum(rank + 1.0 for rank in ranks)]


def check_that_calls_are_made() -> None:
    everyones = all_drawn()
    tensor = everyones[my_rank()].clone()
    dist.all_reduce(tensor)
    check(tensor, combined("SUM", everyones))
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, f"rank {my_rank()}")
    assert names == [f"rank {rank}" for rank in range(len(names))]


def test_pytorchs_own_manager_does_not_end_a_block_that_raises(ranks: range) -> None:
    """Negative control; where it fails, `versions.end_blocks_that_raise` is no longer needed."""
    manager = dist._coalescing_manager.__wrapped__.__wrapped__
    with pytest.raises(MistakeError), manager():
        an_error_of_the_program()
    tensor = torch.full((2,), 5.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [5.0, 5.0]
    dist.distributed_c10d._world.pg_coalesce_state.clear()
    check_that_calls_are_made()


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asynchronous"])
def test_lists_of_tensors_are_gathered_and_summed(ranks: range, is_async: bool) -> None:
    """Lists with as many tensors as ranks, and with fewer and more, each of another size."""
    for num_tensors in (1, len(ranks), len(ranks) + 1):
        rows = [all_drawn((2, i + 1), seed=i) for i in range(num_tensors)]
        everyones = [list(tensors) for tensors in zip(*rows, strict=True)]  # by rank
        mine = everyones[my_rank()]
        gathered = [blanks(theirs) for theirs in everyones]
        gathering = dist.all_gather_coalesced(gathered, mine, async_op=is_async)
        summed = [tensor.clone() for tensor in mine]
        summing = dist.all_reduce_coalesced(summed, async_op=is_async)
        if is_async:
            gathering.wait()
            summing.wait()
        for theirs, brought in zip(gathered, everyones, strict=True):
            check_all(theirs, brought)
        check_all(summed, [combined("SUM", row) for row in rows])


# Objects


def test_objects_go_from_and_to_every_root(ranks: range) -> None:
    p, mine = len(ranks), my_rank()
    everyones: list[Any] = [{"rank": rank, "text": "x" * (10 * rank)} for rank in ranks]
    objects: list[Any] = [None] * p
    dist.all_gather_object(objects, everyones[mine])
    assert objects == everyones
    for root in ranks:
        gathered: list[Any] | None = [None] * p if mine == root else None
        dist.gather_object(everyones[mine], gathered, root)
        assert gathered in (None, everyones)
        part: list[Any] = [None]
        dist.scatter_object_list(part, everyones if mine == root else None, root)
        assert part == [everyones[mine]]
        told: list[Any] = list(everyones) if mine == root else [None] * p
        dist.broadcast_object_list(told, root)
        assert told == everyones


def test_objects_go_from_rank_to_rank(ranks: range) -> None:
    p, mine = len(ranks), my_rank()
    if p == 1:
        return
    objects: list[Any] = [None, None]
    if mine == 0:
        dist.send_object_list([{"a": 1}, "b"], 1)
        dist.recv_object_list(objects, 1)
    elif mine == 1:
        dist.recv_object_list(objects, 0)
        dist.send_object_list(objects, 0)
    assert objects == ([{"a": 1}, "b"] if mine < 2 else [None, None])


# Layouts


def contiguous(tensor: Tensor) -> Tensor:
    return tensor.contiguous()


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def strided(tensor: Tensor) -> Tensor:
    spread = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    spread[..., 0] = tensor
    return spread[..., 0]


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


LAYOUTS = [contiguous, transposed, strided, channels_last]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_tensors_of_every_layout_are_served(
    ranks: range, layout: Callable[[Tensor], Tensor]
) -> None:
    p, mine = len(ranks), my_rank()
    everyones = all_drawn((2, 3, 2, 2))
    assert all(torch.equal(layout(tensor), tensor) for tensor in everyones)

    def laid(tensor: Tensor) -> Tensor:
        return layout(tensor.clone())

    total = combined("SUM", everyones)
    reduced = laid(everyones[mine])
    dist.all_reduce(reduced)
    check(reduced, total)
    copied = laid(everyones[mine])
    dist.broadcast(copied, p - 1)
    check(copied, everyones[p - 1])
    brought = laid(everyones[mine])
    parts = [laid(torch.zeros_like(tensor)) for tensor in everyones]
    dist.all_gather(parts, brought)
    check_all(parts, everyones)
    dist.all_to_all(parts := [laid(torch.zeros_like(t)) for t in everyones], [brought] * p)
    check_all(parts, everyones)
    scattered = laid(torch.zeros_like(brought))
    dist.reduce_scatter(scattered, [brought] * p)
    check(scattered, total)
    check(brought, everyones[mine])


def test_the_layouts_differ() -> None:
    """Negative control: but for the first, they are not what the library sends as it is."""
    for layout in LAYOUTS:
        made = layout(drawn(0, (2, 3, 2, 2)))
        assert made.is_contiguous() == (layout is contiguous)


def test_conjugated_and_negated_views_are_sent_as_what_they_mean(ranks: range) -> None:
    """As results they are lost: from 2.14 on PyTorch gives every backend a copy of them."""
    everyones = [tensor.conj() for tensor in all_drawn((4,), torch.complex64)]
    mine = everyones[my_rank()]
    brought = mine.resolve_conj() if my_rank() == 0 else mine
    assert brought.is_conj() == (my_rank() > 0)
    dist.reduce(brought, 0)
    if my_rank() == 0:
        check(brought, combined("SUM", everyones))
    negative = [tensor.imag for tensor in everyones]
    assert all(tensor.is_neg() for tensor in negative)
    parts = blanks(negative)
    dist.all_gather(parts, negative[my_rank()])
    check_all(parts, negative)
    scattered = blank(negative[0])
    dist.reduce_scatter(scattered, [negative[my_rank()]] * len(ranks))
    check(scattered, combined("SUM", negative))


def test_tensors_of_every_shape_are_served(ranks: range) -> None:
    for shape in SHAPES:
        everyones = all_drawn(shape)
        total = combined("SUM", everyones)
        reduced = everyones[my_rank()].clone()
        dist.all_reduce(reduced)
        check(reduced, total)
        copied = everyones[my_rank()].clone()
        dist.broadcast(copied, len(ranks) - 1)
        check(copied, everyones[-1])
        parts = blanks(everyones)
        dist.all_gather(parts, everyones[my_rank()])
        check_all(parts, everyones)
        dist.all_to_all(parts := blanks(everyones), [everyones[my_rank()]] * len(ranks))
        check_all(parts, everyones)
        scattered = blank(total)
        dist.reduce_scatter(scattered, [everyones[my_rank()]] * len(ranks))
        check(scattered, total)


def test_tensors_that_need_gradients_are_served(ranks: range) -> None:
    everyones = all_drawn()
    total = combined("SUM", everyones)
    leaf = everyones[my_rank()].clone().requires_grad_()
    parts = blanks(everyones)
    dist.all_gather(parts, leaf)
    check_all(parts, everyones)
    dist.all_reduce(leaf)
    check(leaf, total)
    assert leaf.requires_grad and leaf.is_leaf
    inner = (leaf * 1.0).sum()
    dist.all_reduce(inner)
    check(inner, total.sum() * len(ranks))


def test_a_wrong_result_is_noticed() -> None:
    """Negative control of the comparison."""
    wanted = drawn(0)
    for wrong in (wanted + 1, wanted.double(), wanted.flatten()):
        with pytest.raises(AssertionError):
            check(wrong, wanted)
    with pytest.raises(AssertionError):
        check_all([wanted], [wanted, wanted])
