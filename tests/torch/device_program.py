"""Calls of a process group on tensors of a GPU, whose work is in the order of streams.

Arguments: names of functions below, or of PyTorch's strategies, which run one after the other on a
GPU.  All raise an error for what is wrong.  `tests/gpu/test_torch.py` starts it, and
`test_devices.py` runs the functions on the fake GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import collectives.torch
from collectives.torch import communicator
from collectives.torch.tensors import can_be_combined
from tests.torch.groups import default_group
from tests.torch.places import OnCuda, Place
from tests.torch.strategies import STRATEGIES
from tests.torch.tensors import DTYPES, Tensor, all_drawn, blank, blanks, check, combined

Program = Callable[[Place], None]
PROGRAMS: dict[str, Program] = {}
TRAINED = (  # of `STRATEGIES`, those that a GPU runs
    "ddp",
    "ddp_with_a_hook",
    "ddp_with_views_of_buckets",
    "ddp_in_bfloat16",
    "zero_redundancy",
    "fsdp",
    "fsdp_in_bfloat16",
    "hybrid_fsdp",
    "tensor_parallel",
    "sequence_parallel",
    "fsdp_of_tensor_parallel",
    "gpipe",
    "one_f_one_b",
    "interleaved",
)
CLOSE = {"rtol": 1e-3, "atol": 1e-5}  # other kernels compute, in float32


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def me() -> int:
    return dist.get_rank()


def everyones(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What the ranks bring: as many rows for each rank."""
    return all_drawn((2 * dist.get_world_size(), 2), dtype, seed)


def same(place: Place, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Results on the device must be these, as far as the current stream knows."""
    for one, other in zip(actual, expected, strict=True):
        check(place.on_host(one), other)


@program
def every_collective_of_every_dtype(place: Place) -> None:
    size, root = dist.get_world_size(), dist.get_world_size() - 1
    for dtype in DTYPES:
        brought = everyones(dtype=dtype)
        x, whole = place.on_device(brought[me()]), torch.cat(brought)
        y, parts = place.on_device(whole), [place.on_device(one) for one in blanks(brought)]
        dist.all_gather_into_tensor(y, x)
        same(place, [y], [whole])
        dist.all_gather(parts, x)
        same(place, parts, brought)
        dist.broadcast(x, root)
        same(place, [x], [brought[root]])
        mine = [place.on_device(one) for one in brought] if me() == root else None
        dist.scatter(x, mine, root)
        same(place, [x], [brought[me()]])
        dist.gather(x, parts if me() == root else None, root)
        dist.all_to_all_single(y[: 2 * size], x)
        to_me = torch.cat([one[2 * me() : 2 * me() + 2] for one in brought])
        same(place, [y[: 2 * size]], [to_me])
        if can_be_combined(dtype):
            total = combined("SUM", brought)
            dist.reduce_scatter_tensor(y[:2], x)
            same(place, [y[:2]], [total[2 * me() : 2 * me() + 2]])
            dist.all_reduce(x)
            same(place, [x], [total])


@program
def tensors_that_are_not_contiguous(place: Place) -> None:
    brought = everyones()
    x, y = place.on_device(brought[me()].t().contiguous()).t(), place.on_device(brought[0])[:, :1]
    dist.all_reduce(x)
    same(place, [x], [combined("SUM", brought)])
    work = dist.all_reduce(x, ReduceOp.MAX, async_op=True)
    work.wait()
    same(place, [x], [combined("SUM", brought)])
    dist.broadcast(y, 0)
    same(place, [y], [brought[0][:, :1]])


@program
def a_part_of_the_output_is_the_input(place: Place) -> None:
    """As in FSDP."""
    brought = everyones()
    size = len(brought[0])
    y = place.on_device(torch.cat(brought[:1] * me() + [brought[me()]] + brought[:1] * 3))
    y = y[: size * dist.get_world_size()]
    dist.all_gather_into_tensor(y, y[size * me() : size * (me() + 1)], async_op=True).wait()
    same(place, [y], [torch.cat(brought)])
    mine = y[size * me() : size * (me() + 1)][:2]
    dist.reduce_scatter_tensor(mine, y[: 2 * dist.get_world_size()])
    total = dist.get_world_size() * torch.cat(brought)[2 * me() : 2 * me() + 2]
    same(place, [mine], [total])


@program
def wait_orders_streams(place: Place) -> None:
    """A stream writes the input, another one reads the result."""
    for seed in range(4):
        brought = everyones(seed)
        source, x = place.on_device(brought[me()]), place.on_device(blank(brought[0]))
        first, other = place.new_stream(), place.new_stream()
        with place.on_stream(first):
            place.be_slow()
            place.copy(source, x)
            work = dist.all_reduce(x, async_op=True)
        with place.on_stream(other):
            work.wait()
            y = place.on_device(blank(brought[0]))
            place.copy(x, y)
            same(place, [y], [combined("SUM", brought)])


@program
def calls_under_way_at_once(place: Place) -> None:
    """Waited for in another order on each rank."""
    total, calls = combined("SUM", everyones()), []
    for _ in range(5):
        x = place.on_device(everyones()[me()])
        calls.append((dist.all_reduce(x, async_op=True), x))
    for work, x in calls if me() % 2 else reversed(calls):
        work.wait()
        same(place, [x], [total])


@program
def memory_is_not_reused_before_the_end(place: Place) -> None:
    """The input is dropped at once, and others are made in its place."""
    for seed in range(4):
        brought = everyones(seed)
        y = place.on_device(blank(torch.cat(brought)))
        place.be_slow()
        work = dist.all_gather_into_tensor(y, place.on_device(brought[me()]), async_op=True)
        others = [place.on_device(brought[me()] + 7) for _ in range(3)]
        work.wait()
        same(place, [y], [torch.cat(brought)])
        del others


@program
def futures(place: Place) -> None:
    brought = everyones()
    for like in (brought, [one.t().contiguous().t() for one in brought]):
        x = place.on_device(like[me()])
        place.be_slow()
        work = dist.all_reduce(x, async_op=True)
        (value,) = place.value_of(work.get_future())
        y = place.on_device(blank(brought[0]))
        place.copy(value, y)
        same(place, [y], [combined("SUM", brought)])
        work.wait()


@program
def messages(place: Place) -> None:
    brought, size = everyones(), dist.get_world_size()
    left, right = (me() - 1) % size, (me() + 1) % size
    dist.barrier()
    for _ in range(3):
        x, y = place.on_device(brought[me()]), place.on_device(blank(brought[0]))
        operations = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        same(place, [y], [brought[left]])
    x, y = place.on_device(brought[me()]), place.on_device(blank(brought[0]).t()).t()
    sending = dist.isend(x, right, tag=3)
    assert dist.recv(y, tag=3) == left  # from any rank
    same(place, [y], [brought[left]])
    sending.wait()


@program
def hosts_and_devices_in_one_group(place: Place) -> None:
    brought, objects = everyones(), [None] * dist.get_world_size()
    for turn in range(4):
        x = place.on_device(brought[me()]) if turn % 2 else brought[me()].clone()
        dist.all_reduce(x)
        same(place, [x], [combined("SUM", brought)])
    dist.all_gather_object(objects, {"rank": me()})
    assert objects == [{"rank": rank} for rank in range(dist.get_world_size())]


@program
def results_in_host_memory(place: Place) -> None:
    """Of a call whose input is on the device."""
    wanted = everyones()
    gathered = [torch.empty_like(tensor) for tensor in wanted]
    dist.all_gather(gathered, place.on_device(wanted[me()]))
    for one, other in zip(gathered, wanted, strict=True):
        check(one, other)


@program
def the_ledger_has_links_and_modules(place: Place) -> None:
    """It is that of tensors on the host, but for the links."""
    model = torch.nn.Linear(2, 2)
    rows = []
    for make in (torch.clone, place.on_device):
        x = make(everyones()[me()])
        dist.all_reduce(x)
        hook = model.register_forward_hook(lambda *_, x=x: dist.all_reduce(x))
        with collectives.torch.record(model) as ledger:
            model(torch.ones(1, 2))
            communicator().synchronize()
        hook.remove()
        rows.append(ledger.rows())
    on_host, on_device = rows
    assert {row.phase for row in on_device} <= {"forward"}
    assert {row.link for row in on_host} <= {"host"}
    assert {row.link for row in on_device} <= {"peer"}
    assert sum(row.bytes for row in on_device) > 0 or dist.get_world_size() == 1


def trained(name: str) -> None:
    """A strategy computes on the GPU what it does on the host with Gloo."""
    with default_group("gloo"):
        on_host = STRATEGIES[name]()
    with default_group("ring"), torch.device("cuda"):
        on_device = STRATEGIES[name]()
    for one, other in zip(on_device, on_host, strict=True):
        assert one.is_cuda
        torch.testing.assert_close(one.cpu(), other, **CLOSE)


def main(*names: str) -> None:
    """Run programs on a GPU, and say so after each."""
    rank = int(os.environ["RANK"])
    place = OnCuda(rank)
    for name in names:
        if name in TRAINED:
            trained(name)
        else:
            with default_group("ring"):
                PROGRAMS[name](place)
        torch.cuda.synchronize()
        print(f"{name} is right on rank {rank}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
