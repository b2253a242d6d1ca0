"""What does not fit is refused before anything is sent, and the group is as usable as before.

Only one rank makes these calls: a message of it would find no receiver, and would be noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

from tests.torch.tensors import Tensor, all_drawn, check, combined, operator

pytestmark = pytest.mark.mpi

# What is called, the call, and how its error begins; PyTorch refuses some calls by itself.
Case: TypeAlias = tuple[str, Callable[[], Any], str | tuple[str, ...]]

DTYPES = "ValueError: Invalid usage of tensors with different dtypes"


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def lists(p: int, rank: int) -> Iterator[Case]:
    """Lists of a wrong length, or with tensors of wrong sizes or dtypes."""
    good, wrong_lists = [ones(2)] * p, list(lists_of_wrong_lengths_or_dtypes(p))
    unequal = [ones(2)] * rank + [ones(3)] + [ones(2)] * (p - rank - 1)  # not in its own place
    own = f"ValueError: rank {rank} has 2 elements, and its place in the list has 3"
    for name, wrong, says in [*wrong_lists, ("unequal", unequal, own)]:
        for call, function in calls_with_a_list(wrong, rank):
            yield f"{call}, {name}", function, says
    others = [ones(3)] * rank + [ones(2)] + [ones(3)] * (p - rank - 1)  # only in its own place
    sizes = [part.numel() for part in others]
    says = f"ValueError: the tensors of {p} ranks must be equally large, not {sizes}"
    yield "gather, others", lambda: dist.gather(ones(2), others, rank), says
    yield "scatter, others", lambda: dist.scatter(ones(2), others, rank), says
    for name, wrong, says in wrong_lists:
        yield f"all_to_all from {name}", partial(dist.all_to_all, list(good), wrong), says
        yield f"all_to_all to {name}", partial(dist.all_to_all, wrong, list(good)), says


def lists_of_wrong_lengths_or_dtypes(p: int) -> Iterator[tuple[str, list[Tensor], str]]:
    for name, length in [("short", p - 1), ("long", p + 1)]:
        says = f"ValueError: the list must have one tensor for each of the {p} ranks; it has "
        yield name, [ones(2)] * length, says + str(length)
    yield "mixed", [ones(2)] * (p - 1) + [ones(2, dtype=torch.int32)], DTYPES


def calls_with_a_list(tensors: list[Tensor], root: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "all_gather", lambda: dist.all_gather(tensors, ones(2))
    yield "reduce_scatter", lambda: dist.reduce_scatter(ones(2), tensors)
    yield "gather", lambda: dist.gather(ones(2), tensors, root)
    yield "scatter", lambda: dist.scatter(ones(2), tensors, root)


def wholes(p: int) -> Iterator[Case]:
    """Tensors for all ranks that are not as large as those of the ranks together."""
    for whole in (ones(2 * p + 1), ones(2 * p, dtype=torch.int32)):
        says = (
            f"ValueError: 2 torch.float32 on each of {p} ranks do not fit a tensor of "
            f"{whole.numel()} {whole.dtype}"
        )
        for name, call in [
            ("all_gather_into_tensor", partial(dist.all_gather_into_tensor, whole, ones(2))),
            ("reduce_scatter_tensor", partial(dist.reduce_scatter_tensor, ones(2), whole)),
        ]:
            yield f"{name}, {whole.numel()} {whole.dtype}", call, says


def splits(p: int) -> Iterator[Case]:
    """Parts that do not divide the rows among the ranks."""
    good, few, many = [1] * p, [1] * (p - 1), [2] * p
    for name, wrong, sizes in [
        ("few to", few, (few, good)),
        ("few from", few, (good, few)),
        ("many to", many, (many, good)),
        ("many from", many, (good, many)),
    ]:
        says = f"ValueError: split sizes {wrong} do not divide {p} rows among {p} ranks"
        yield name, partial(dist.all_to_all_single, ones(p, 2), ones(p, 2), *sizes), says
    yield (
        "an odd row",
        lambda: dist.all_to_all_single(ones(p + 1), ones(p + 1)),
        f"ValueError: {p + 1} rows cannot be divided equally among {p} ranks",
    )
    yield (
        "another dtype",
        lambda: dist.all_to_all_single(ones(p, dtype=torch.int32), ones(p)),
        DTYPES,
    )


def layouts(p: int) -> Iterator[Case]:
    """Tensors that are no arrays.  Newer versions of PyTorch refuse them before the backend."""
    unknown = "NotImplementedError: Could not run 'c10d::"
    yield (
        "sparse",
        lambda: dist.all_gather([ones(3, 3)] * p, ones(3, 3).to_sparse()),
        ("ValueError: a tensor must be dense, not of layout torch.sparse_coo", unknown),
    )
    yield (
        "quantized",
        lambda: dist.broadcast(torch.quantize_per_tensor(ones(4), 0.1, 0, torch.qint8), 0),
        ("TypeError: a quantized tensor (torch.qint8) cannot be sent", unknown),
    )


def overlaps(p: int, rank: int) -> Iterator[Case]:
    """Tensors to be filled that have one element in several places."""
    one, other = ones(1).expand(2), (rank + 1) % p
    whole, parts = ones(1).expand(2 * p), [ones(2)] * (p - 1) + [one]
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(one),
        "reduce": lambda: dist.reduce(one, rank),
        "reduce_scatter": lambda: dist.reduce_scatter(one, [ones(2)] * p),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one, ones(2 * p)),
        "broadcast": lambda: dist.broadcast(one, other),
        "scatter": lambda: dist.scatter(one, None, other),
        "gather": lambda: dist.gather(ones(2), parts, rank),
        "all_gather": lambda: dist.all_gather(parts, ones(2)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, ones(2)),
        "all_to_all": lambda: dist.all_to_all(parts, [ones(2)] * p),
        "all_to_all_single": lambda: dist.all_to_all_single(whole, ones(2 * p)),
        "recv": lambda: dist.recv(one, other),
        "recv from any rank": lambda: dist.recv(one),
    }
    for name, call in calls.items():
        yield (
            f"{name}, overlapping",
            call,
            "ValueError: a tensor to be filled has elements that share memory; clone it first",
        )


def operators(p: int, rank: int) -> Iterator[Case]:
    """Reductions that have no meaning for a dtype."""
    numbers, half = ones(2 * p, dtype=torch.int32), dist._make_nccl_premul_sum(0.5)
    for name, call in [
        ("all_reduce", lambda: dist.all_reduce(numbers, half)),
        ("reduce", lambda: dist.reduce(numbers, rank, half)),
        ("reduce_scatter", lambda: dist.reduce_scatter_tensor(numbers[:2], numbers, half)),
    ]:
        says = "TypeError: PREMUL_SUM with the factor 0.5 has no meaning for torch.int32"
        yield f"{name}, PREMUL_SUM", call, says
    for dtype, op, says in [
        (torch.float8_e5m2, "SUM", "TypeError: tensors of dtype torch.float8_e5m2 can be sent"),
        (
            torch.complex64,
            "MAX",
            "ValueError: all_reduce does not support RedOpType.MAX on complex",
        ),
        (torch.float32, "BAND", "TypeError: op 'and' is not defined for dtype float32"),
    ]:
        yield f"{op} {dtype}", partial(dist.all_reduce, ones(2, dtype=dtype), operator(op)), says


def messages(rank: int) -> Iterator[Case]:
    """Messages that no rank can receive, alone and in batches."""
    by_pytorch = "ValueError: Invalid destination rank: destination rank should not be the same as"
    yield "send to itself", lambda: dist.send(ones(2), rank), by_pytorch
    negative, overlapping = "ValueError: tag must be", "ValueError: a tensor to be filled"
    for name, call, tensor, tag, says in [
        ("isend", dist.isend, ones(2), -1, negative),
        ("irecv", dist.irecv, ones(2), -1, negative),
        ("irecv, overlapping", dist.irecv, ones(1).expand(2), 0, overlapping),
    ]:
        yield name, partial(call, tensor, rank, tag=tag), says
        batch = [dist.P2POp(call, tensor, rank, tag=tag)]
        yield f"a batch of {name}", partial(dist.batch_isend_irecv, batch), says


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
def test_wrong_arguments_are_refused_before_anything_is_sent(ranks: range, place: int) -> None:
    rank = ranks[place]
    try:
        if dist.get_rank() == rank:
            for case in all_cases(len(ranks), rank):
                refused(*case)
    finally:  # the other ranks wait for this one
        everyones = all_drawn()
        tensor = everyones[dist.get_rank()].clone()
        dist.all_reduce(tensor)
    check(tensor, combined("SUM", everyones))


def all_cases(p: int, rank: int) -> Iterator[Case]:
    yield from lists(p, rank)
    yield from wholes(p)
    yield from splits(p)
    yield from layouts(p)
    yield from overlaps(p, rank)
    yield from operators(p, rank)
    yield from messages(rank)


def refused(name: str, call: Callable[[], Any], says: str | tuple[str, ...]) -> None:
    """The call must raise an error that begins so (or in one of these ways)."""
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(f"{name} was not refused")
    assert said.startswith(says), f"{name}: {said}"


def test_arguments_that_fit_are_not_refused(ranks: range) -> None:
    """Negative control."""
    with pytest.raises(AssertionError, match="a barrier was not refused"):
        refused("a barrier", dist.barrier, "")


def test_another_sentence_is_noticed(ranks: range) -> None:
    """Negative control."""
    call = partial(dist.all_gather, [], ones(2))
    with pytest.raises(AssertionError, match="an empty list: ValueError: the list must have"):
        refused("an empty list", call, "TypeError: the list must have")
