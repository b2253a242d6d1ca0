"""Tensors on a device, which here is the fake GPU: calls in the order of streams."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ml_dtypes import bfloat16
from mpi4py import MPI
from torch.distributed import DistBackendError

from collectives.arrays import HOST
from collectives.devices import Devices
from collectives.devices.order import Order
from collectives.torch import devices
from collectives.torch.tensors import HOST_MEMORY, Tensor
from tests.fakes.device import BACKEND, FakeStream
from tests.fakes.driver import gpu
from tests.fakes.held_stream import hold, released
from tests.torch import device_program
from tests.torch.device_program import PROGRAMS
from tests.torch.places import FakeMemory, OnFake, fake_place
from tests.torch.tensors import DTYPES, all_drawn, blank, check, combined

pytestmark = pytest.mark.mpi


@cache
def go_on_alone() -> None:
    gpu().go_on_alone()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, ranks: range) -> Iterator[OnFake]:
    """The fake GPU as it is at first; afterwards nothing was done that CUDA forbids."""
    go_on_alone()
    BACKEND.reset()
    gpu().reset(seed=dist.get_rank())
    with fake_place(monkeypatch) as place:
        yield place
        if dist.is_initialized():
            dist.destroy_process_group()
    gpu().check()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_right(place: OnFake, name: str) -> None:
    PROGRAMS[name](place)


@pytest.fixture
def word() -> Iterator[np.ndarray]:
    """A word for which streams can wait; see `hold`."""
    with released() as word:
        yield word


def brought(place: OnFake) -> tuple[Tensor, Tensor]:
    """What this rank brings, on the device, and the sum of all; the ranks have agreed on links."""
    everyones = all_drawn()
    dist.all_reduce(place.on_device(everyones[0]))
    dist.barrier()
    return place.on_device(everyones[dist.get_rank()]), combined("SUM", everyones)


def copied(place: OnFake, x: Tensor) -> Tensor:
    """A copy on the device, in the order of the current stream."""
    y = place.on_device(blank(x))
    place.copy(x, y)
    return y


# The host does not wait


def test_calls_and_waits_return_before_the_device_has_begun(
    place: OnFake, word: np.ndarray
) -> None:
    (x, total), (y, _) = brought(place), brought(place)
    hold(BACKEND.current_stream(), word)
    dist.all_reduce(x)
    work = dist.all_reduce(y, async_op=True)
    assert work.wait()
    copies = [copied(place, one) for one in (x, y)]
    assert not work.is_completed()
    MPI.COMM_WORLD.Barrier()  # all ranks have come so far
    word[:] = 1
    for one in copies:
        check(place.on_host(one), total)
    assert work.is_completed()


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_a_future_is_done_before_the_device_has_begun(
    place: OnFake, word: np.ndarray, is_contiguous: bool
) -> None:
    """It notes the end of a stream on which only this call is waited for."""
    x, total = brought(place)
    x = x if is_contiguous else place.on_device(x.t().contiguous()).t()
    hold(BACKEND.current_stream(), word)
    future = dist.all_reduce(x, async_op=True).get_future()
    future.wait()
    assert place.memory.futures == ["beside"]
    assert {name for _, name in place.memory.kept} == (set() if is_contiguous else {"beside"})
    MPI.COMM_WORLD.Barrier()
    with place.on_stream(place.new_stream()):
        place.value_of(future)
        copy = copied(place, x)
        word[:] = 1
        check(place.on_host(copy), total)


def test_a_wait_with_a_time_limit_waits_on_the_host(place: OnFake, word: np.ndarray) -> None:
    """As with NCCL."""
    x, _ = brought(place)
    hold(BACKEND.current_stream(), word)
    work = dist.all_reduce(x, async_op=True)
    with pytest.raises(DistBackendError, match=r"waited 0\.1 s for its device"):
        work.wait(timedelta(seconds=0.1))
    MPI.COMM_WORLD.Barrier()
    word[:] = 1
    work.wait(timedelta(seconds=60))
    assert work.is_completed()


def test_a_barrier_waits_on_the_host(
    place: OnFake, word: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, total = brought(place)
    right, is_waiting = Devices.synchronize, threading.Event()

    def synchronize(self: Devices, limit: float | None) -> None:
        is_waiting.set()
        right(self, limit)

    def release() -> None:
        is_waiting.wait()
        word[:] = 1

    monkeypatch.setattr(Devices, "synchronize", synchronize)
    hold(BACKEND.current_stream(), word)
    dist.all_reduce(x)
    assert word[0] == 0
    thread = threading.Thread(target=release)
    thread.start()
    dist.barrier()
    thread.join()
    assert word[0] == 1
    assert torch.equal(x, total)  # which the host may read


# Negative controls


def on_another_stream(self: FakeMemory) -> AbstractContextManager[Any]:
    return BACKEND.on_stream(FakeStream("not PyTorch's"))


def on_no_stream(self: OnFake, future: Any) -> Any:
    return future.wait()


@pytest.mark.parametrize(
    ("name", "owner", "method", "wrong"),
    [
        ("wait_orders_streams", FakeMemory, "in_order", on_another_stream),
        ("futures", OnFake, "value_of", on_no_stream),
    ],
)
def test_what_is_left_out_is_noticed(
    place: OnFake, name: str, owner: type, method: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong_results = device_program.same, list[AssertionError]()

    def same(*arguments: Any) -> None:
        """It goes on, as the other ranks may."""
        try:
            right(*arguments)
        except AssertionError as error:
            wrong_results.append(error)

    monkeypatch.setattr(device_program, "same", same)
    monkeypatch.setattr(owner, method, wrong)
    PROGRAMS[name](place)
    BACKEND.synchronize()
    assert wrong_results or gpu().violations
    gpu().violations.clear()


def not_kept(self: Order, enqueued: Any, something: object) -> None:
    """What stands for `keep_until`."""


@pytest.mark.parametrize("is_right", [True, False])
def test_the_memory_of_an_input_is_kept_until_the_end(
    place: OnFake, word: np.ndarray, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _ = brought(place)
    y = place.on_device(torch.cat(all_drawn()))
    if not is_right:
        monkeypatch.setattr(Order, "keep_until", not_kept)
    hold(BACKEND.current_stream(), word)
    dist.all_gather_into_tensor(y, x, async_op=True).wait()
    address = x.data_ptr()
    del x
    assert gpu().has_array_at(address) == is_right
    MPI.COMM_WORLD.Barrier()
    word[:] = 1


@pytest.mark.parametrize("is_right", [True, False])
def test_results_that_one_stream_copies_are_ordered_for_another_one(
    place: OnFake, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: nobody notes where the copy ends."""
    x, _ = brought(place)
    x = place.on_device(x.t().contiguous()).t()
    if not is_right:
        monkeypatch.setattr(BACKEND, "record", HOST.record)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    with place.on_stream(place.new_stream()):
        work.wait()
        place.on_host(copied(place, x))
    BACKEND.synchronize()
    assert any("nothing orders" in line for line in gpu().violations) != is_right
    gpu().violations.clear()


# Without CuPy


def test_without_cupy_tensors_on_a_gpu_are_copied_which_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda _: None)
    with pytest.warns(UserWarning, match="pip install cupy-cuda12x"):
        assert devices.memory_on_gpu.__wrapped__(torch.device("cuda", 0)) is HOST_MEMORY


# With CuPy, of which there is none here


class Streams:
    """What stands for the streams of PyTorch and of CuPy: it notes which are current."""

    def __init__(self) -> None:
        self.of_torch, self.of_cupy = [7], list[tuple[int, int]]()

    @contextmanager
    def on_torch(self, stream: Any) -> Iterator[None]:
        self.of_torch.append(stream.cuda_stream)
        yield
        self.of_torch.pop()

    @contextmanager
    def on_cupy(self, stream: tuple[int, int]) -> Iterator[None]:
        self.of_cupy.append(stream)
        yield
        self.of_cupy.pop()

    def current(self, device: object = None) -> Any:
        return SimpleNamespace(cuda_stream=self.of_torch[-1])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[devices.CudaMemory, Streams]]:
    """The memory of a GPU whose tensors are on the host."""
    streams = Streams()
    cupy = SimpleNamespace(
        from_dlpack=lambda capsule: torch.utils.dlpack.from_dlpack(capsule).numpy(),
        cuda=SimpleNamespace(Device=nullcontext, ExternalStream=lambda *stream: stream),
    )
    backend = SimpleNamespace(on_stream=streams.on_cupy)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(devices, "backend_of_kind", {"cupy": backend}.__getitem__)
    for name, made in {
        "device": nullcontext,
        "current_stream": streams.current,
        "Stream": lambda device: SimpleNamespace(cuda_stream=9),
        "stream": streams.on_torch,
    }.items():
        monkeypatch.setattr(torch.cuda, name, made)
    devices.stream_for_cupy.cache_clear()
    yield devices.CudaMemory(torch.device("cuda", 1)), streams
    devices.stream_for_cupy.cache_clear()


def test_calls_are_made_on_the_current_stream_of_pytorch(
    cuda: tuple[devices.CudaMemory, Streams],
) -> None:
    memory, streams = cuda
    with memory.in_order():
        assert streams.of_cupy == [(7, 1)]
    with memory.beside():
        assert (streams.of_torch, streams.of_cupy) == ([7, 9], [(9, 1)])
    assert (streams.of_torch, streams.of_cupy) == ([7], [])


def test_tensors_are_handed_over_without_a_copy(cuda: tuple[devices.CudaMemory, Streams]) -> None:
    memory, _ = cuda
    for dtype in DTYPES:
        x = torch.zeros(4, 2, dtype=dtype).requires_grad_(dtype.is_floating_point)
        array = memory.array_of(x)
        assert array.ctypes.data == x.data_ptr() and array.shape == (4, 2)
        assert (array.dtype == bfloat16) == (dtype is torch.bfloat16)
