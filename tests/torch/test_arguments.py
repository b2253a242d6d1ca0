"""What does not fit is refused before anything is sent, and the group is as usable as before.

Only one rank makes these calls: a message of it would find no receiver, and would be noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

from tests.torch.tensors import Tensor, all_drawn, check, combined

pytestmark = pytest.mark.mpi

Case: TypeAlias = tuple[str, Callable[[], Any]]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def lists(p: int, rank: int) -> Iterator[Case]:
    """Lists of a wrong length, or with tensors of wrong sizes or dtypes."""
    good, short, long = [ones(2)] * p, [ones(2)] * (p - 1), [ones(2)] * (p + 1)
    mixed = [ones(2)] * (p - 1) + [ones(2, dtype=torch.int32)]
    unequal = [ones(2)] * rank + [ones(3)] + [ones(2)] * (p - rank - 1)  # not in its own place
    others = [ones(3)] * rank + [ones(2)] + [ones(3)] * (p - rank - 1)  # only in its own place
    for name, wrong in [("short", short), ("long", long), ("mixed", mixed), ("unequal", unequal)]:
        yield f"all_gather, {name}", lambda wrong=wrong: dist.all_gather(wrong, ones(2))
        yield f"reduce_scatter, {name}", lambda wrong=wrong: dist.reduce_scatter(ones(2), wrong)
        yield f"gather, {name}", lambda wrong=wrong: dist.gather(ones(2), wrong, rank)
        yield f"scatter, {name}", lambda wrong=wrong: dist.scatter(ones(2), wrong, rank)
    yield "gather, others", lambda: dist.gather(ones(2), others, rank)
    yield "scatter, others", lambda: dist.scatter(ones(2), others, rank)
    for name, wrong in [("short", short), ("long", long), ("mixed", mixed)]:
        yield f"all_to_all from {name}", lambda wrong=wrong: dist.all_to_all(list(good), wrong)
        yield f"all_to_all to {name}", lambda wrong=wrong: dist.all_to_all(wrong, list(good))


def wholes(p: int) -> Iterator[Case]:
    """Tensors for all ranks that are not as large as those of the ranks together."""
    for name, whole in [("large", ones(2 * p + 1)), ("int", ones(2 * p, dtype=torch.int32))]:
        yield (
            f"all_gather_into_tensor, {name}",
            lambda whole=whole: dist.all_gather_into_tensor(whole, ones(2)),
        )
        yield (
            f"reduce_scatter_tensor, {name}",
            lambda whole=whole: dist.reduce_scatter_tensor(ones(2), whole),
        )


def splits(p: int) -> Iterator[Case]:
    """Parts that do not divide the rows among the ranks."""
    good, few, many = [1] * p, [1] * (p - 1), [2] * p
    for name, sizes in [
        ("few to", (few, good)),
        ("few from", (good, few)),
        ("many to", (many, good)),
        ("many from", (good, many)),
    ]:
        yield name, lambda sizes=sizes: dist.all_to_all_single(ones(p, 2), ones(p, 2), *sizes)
    yield "an odd row", lambda: dist.all_to_all_single(ones(p + 1), ones(p + 1))
    yield (
        "another dtype",
        lambda: dist.all_to_all_single(ones(p, dtype=torch.int32), ones(p)),
    )


def layouts(p: int) -> Iterator[Case]:
    """Tensors that are no arrays."""
    sparse = ones(3, 3).to_sparse()
    yield "sparse", lambda: dist.all_gather([ones(3, 3)] * p, sparse)
    quantized = torch.quantize_per_tensor(ones(4), 0.1, 0, torch.qint8)
    yield "quantized", lambda: dist.broadcast(quantized, 0)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_wrong_arguments_are_refused_before_anything_is_sent(ranks: range) -> None:
    p = len(ranks)
    for rank in (0, p - 1):
        for name, call in (*lists(p, rank), *wholes(p), *splits(p), *layouts(p)):
            if dist.get_rank() == rank:
                refused(name, call)
        everyones = all_drawn()
        found = everyones[dist.get_rank()].clone()
        dist.all_reduce(found)
        check(found, combined("SUM", everyones))


def refused(name: str, call: Callable[[], Any]) -> None:
    """The call must raise ValueError or TypeError, with a sentence.

    PyTorch refuses some of them by itself, with RuntimeError.
    """
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        said = error
    else:
        raise AssertionError(f"{name} was not refused")
    assert not isinstance(said, dist.DistBackendError) and len(str(said)) > 20, f"{name}: {said}"


def test_what_fits_is_not_refused(ranks: range) -> None:
    """Negative control."""
    with pytest.raises(AssertionError, match="a barrier was not refused"):
        refused("a barrier", dist.barrier)


def test_sums_of_other_sizes_on_other_ranks_fail_on_a_rank(ranks: range) -> None:
    with pytest.raises(TypeError):
        dist.all_reduce(ones(2, dtype=torch.float8_e5m2))
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX)
    with pytest.raises((TypeError, ValueError)):
        dist.all_reduce(ones(2), dist.ReduceOp.BAND)
    dist.barrier()
