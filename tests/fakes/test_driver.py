"""The fake driver does what CUDA does, and notices what must not be done.

Run as a program, this file is the other process of its tests: see `Peer`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.devices.driver import (
    FUNCTIONS,
    LAZY_PEER_ACCESS,
    MAPPED,
    PORTABLE,
    WAIT_VALUE,
    WRITE_VALUE,
    DriverError,
    IpcHandle,
)
from tests.fakes.driver import ALIGNMENT, GARBAGE, FakeGpu, gpu, is_alive, reset

ROOT = Path(__file__).parents[2]
PATIENCE = 30  # seconds until another process is given up


@pytest.fixture(autouse=True)
def _no_violations() -> Iterator[None]:
    reset()
    limit = gpu().limit
    yield
    gpu().limit = limit
    reset()


@pytest.fixture
def fake() -> FakeGpu:
    return gpu()


@pytest.fixture
def counters() -> Iterator[np.ndarray]:
    """Words in page-locked host memory."""
    memory = np.zeros(1024, np.uint32)
    gpu().driver.call("cuMemHostRegister_v2", memory.ctypes.data, memory.nbytes, PORTABLE | MAPPED)
    yield memory
    try:
        reset()  # what waits for them is dropped
    finally:
        gpu().driver.call("cuMemHostUnregister", memory.ctypes.data)


def expect(text: str) -> None:
    """The violation that has happened; it is forgotten."""
    with pytest.raises(AssertionError, match=text):
        reset()


def at(words: np.ndarray, index: int = 0) -> int:
    """The address of an element."""
    return words.ctypes.data + index * words.itemsize


def batch(stream: int, *operations: Sequence[int]) -> int:
    """Put memory operations on a stream: kind, address, value, and flags if there are any."""
    table = np.zeros((len(operations), 6), np.uint64)
    for row, operation in zip(table, operations, strict=True):
        row[: len(operation)] = operation
    return gpu().driver.try_call("cuStreamBatchMemOp_v2", stream, len(table), at(table), 0)


def wait(stream: int, address: int, value: int = 1) -> None:
    assert batch(stream, (WAIT_VALUE, address, value)) == 0


def write(stream: int, address: int, value: int) -> None:
    assert batch(stream, (WRITE_VALUE, address, value)) == 0


def copy(target: int, source: int, size: int, stream: int) -> int:
    return gpu().driver.try_call("cuMemcpyDtoDAsync_v2", target, source, size, stream)


def launch(kernel: int, stream: int, *words: int) -> int:
    """Start a kernel; its parameters are overwritten at once."""
    values = np.array(words, np.int64)
    pointers = np.array([at(values, k) for k in range(len(values))], np.int64)
    grid = (1, 1, 1, 256, 1, 1, 0)
    code = gpu().driver.try_call("cuLaunchKernel", kernel, *grid, stream, at(pointers), 0)
    values[:] = pointers[:] = -1
    return code


def combine(
    name: str, result: np.ndarray, operands: Sequence[np.ndarray], lefts: int, stream: int
) -> int:
    kernel = gpu().driver.kernels.combine(name, result.dtype)
    addresses = [at(operand) for operand in operands] + [0] * (8 - len(operands))
    return launch(kernel, stream, at(result), lefts, len(operands), result.size, *addresses)


def filled(values: Any, dtype: Any = np.float32) -> np.ndarray:
    """A device array with contents."""
    values = np.array(values, dtype)
    array = gpu().array(values.shape, dtype)
    array[...] = values
    return array


def after(seconds: float, do: Callable[[], object]) -> threading.Timer:
    """Do something in another thread."""
    timer = threading.Timer(seconds, do)
    timer.start()
    return timer


# The table


def test_every_function_is_there() -> None:
    gc.collect()  # the callbacks must not be garbage
    assert gpu().driver.addresses.keys() == FUNCTIONS.keys()
    assert all(gpu().driver.addresses.values())


def test_the_device_has_an_identity(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fake.driver.uuid() == b"GPU of the tests"
    monkeypatch.setattr(fake, "uuid", bytes(range(16)))
    assert fake.driver.uuid() == bytes(range(16))


def test_what_happened_is_counted(fake: FakeGpu) -> None:
    x, host, stream = filled([1, 2]), np.zeros(1, np.float32), fake.new_stream()
    copy(at(x), at(x, 1), 4, stream)
    copy(at(x), at(x, 1), 4, stream)
    fake.driver.call("cuMemcpyDtoHAsync_v2", at(host), at(x), 4, stream)
    assert fake.num_calls == {"cuMemcpyDtoDAsync_v2": 2, "cuMemcpyDtoHAsync_v2": 1}
    assert fake.bytes_copied == {"DtoD": 8, "DtoH": 4, "HtoD": 0}
    assert fake.streams_used == {stream}
    fake.synchronize()
    assert host == [2]


def test_a_stream_may_be_captured(fake: FakeGpu) -> None:
    stream = fake.new_stream()
    fake.capturing.add(stream)
    status = np.zeros(1, np.int32)
    for handle, is_captured in ((stream, 1), (0, 0)):
        fake.driver.call("cuStreamIsCapturing", handle, status.ctypes.data)
        assert status[0] == is_captured
    fake.capturing.discard(stream)


# Memory


def test_new_memory_is_garbage(fake: FakeGpu) -> None:
    address = fake.driver.allocate(1000)
    assert (fake.memory.view(address, 1000) == GARBAGE).all()
    assert (fake.array((3, 5), np.uint8) == GARBAGE).all()
    fake.driver.call("cuMemFree_v2", address)


def test_an_allocation_has_an_address_a_size_and_a_number(fake: FakeGpu) -> None:
    first, second = fake.driver.allocate(1), fake.driver.allocate(1000)
    assert first % ALIGNMENT == second % ALIGNMENT == 0
    assert fake.driver.allocation(second + 999) == (second, 1000)
    assert fake.driver.buffer_id(second + 999) == fake.driver.buffer_id(second)
    assert fake.driver.buffer_id(first) != fake.driver.buffer_id(second)
    with pytest.raises(DriverError, match="error 1"):
        fake.driver.allocation(second + 1000)
    for address in (first, second):
        fake.free(address)


def test_new_memory_at_an_old_address_has_a_new_number(fake: FakeGpu) -> None:
    old = fake.driver.allocate(1 << 20)
    number = fake.driver.buffer_id(old)
    fake.driver.call("cuMemFree_v2", old)
    new = fake.driver.allocate(1 << 20)
    assert new == old
    assert fake.driver.buffer_id(new) != number
    fake.free(new)


def test_memory_is_freed_once(fake: FakeGpu) -> None:
    address = fake.driver.allocate(8)
    assert fake.driver.try_call("cuMemFree_v2", address + 1) == 1
    assert fake.driver.try_call("cuMemFree_v2", address) == 0
    assert fake.driver.try_call("cuMemFree_v2", address) == 1


def test_no_allocation_is_empty_or_too_large(fake: FakeGpu) -> None:
    pointer = ctypes.c_int64()
    assert fake.driver.try_call("cuMemAlloc_v2", ctypes.addressof(pointer), 0) == 1
    assert fake.driver.try_call("cuMemAlloc_v2", ctypes.addressof(pointer), 1 << 40) == 2


def test_all_memory_can_be_used_again(fake: FakeGpu) -> None:
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        addresses = [fake.memory.allocate(1 << 29).base for _ in range(4)]
        for which in order:
            fake.free(addresses[which])
    large = fake.memory.allocate(1 << 31).base  # only if the gaps have become one
    fake.free(large)


def test_arrays_share_an_allocation_and_do_not_begin_it(fake: FakeGpu) -> None:
    x, y = fake.array((3, 4), np.float32), fake.array(5, np.int64)
    (base, size), other = fake.driver.allocation(at(x)), fake.driver.allocation(at(y))
    assert (base, size) == other
    assert base < at(x) < at(x) + x.nbytes <= at(y) < base + size
    assert at(x) % ALIGNMENT == at(y) % ALIGNMENT == 0
    assert fake.driver.buffer_id(at(x)) == fake.driver.buffer_id(at(y))


def test_arrays_may_have_any_shape_and_dtype(fake: FakeGpu) -> None:
    assert fake.array((), ml_dtypes.bfloat16).shape == ()
    assert fake.array((0, 3), np.complex128).shape == (0, 3)
    assert fake.array((1 << 20, 3), np.uint8).shape == (1 << 20, 3)


def test_a_view_keeps_an_array(fake: FakeGpu) -> None:
    x = fake.array(8, np.float32)
    address, view = at(x), x[2:].reshape(2, 3)[1:]
    del x
    assert at(fake.array(8, np.float32)) != address
    del view
    assert at(fake.array(8, np.float32)) == address


def test_memory_is_used_again_after_what_was_on_streams(
    fake: FakeGpu, counters: np.ndarray
) -> None:
    x, stream, idle = fake.array(8, np.float32), fake.new_stream(), fake.new_stream()
    address = at(x)
    wait(stream, at(counters))
    assert copy(address, address, 32, stream) == 0
    del x
    fake.enqueue(idle, lambda: None)
    assert at(fake.array(8, np.float32)) != address
    counters[0] = 1
    fake.synchronize(stream)
    assert at(fake.array(8, np.float32)) == address


def test_an_array_that_is_gone_cannot_be_used(fake: FakeGpu) -> None:
    x, y = filled([1]), filled([2])
    address = at(x)
    del x
    assert copy(at(y), address, 4, 0) == 700
    expect("it reads 4 bytes .* which are not in one array that exists")


def test_a_pool_gives_memory_up(fake: FakeGpu) -> None:
    x = fake.array(1 << 22, np.uint8)
    y, number = fake.array(1, np.uint8), fake.driver.buffer_id(at(x))
    fake.trim()
    assert fake.driver.buffer_id(at(x)) == number
    del x
    fake.trim()
    again = fake.array(1 << 22, np.uint8)
    assert fake.driver.buffer_id(at(again)) != number
    assert y[0] == GARBAGE


def test_an_array_may_have_no_handle(fake: FakeGpu) -> None:
    x, y = fake.array(1, np.float32, exportable=False), fake.array(1, np.float32)
    assert fake.driver.allocation(at(x)) != fake.driver.allocation(at(y))
    with pytest.raises(DriverError, match="error 1"):
        fake.driver.handle(at(x))
    assert len(fake.driver.handle(at(y))) == 64


# Copies


def test_copies_are_made_later(fake: FakeGpu, counters: np.ndarray) -> None:
    x, y, host = filled([1, 2, 3]), filled([0, 0, 0]), np.zeros(3, np.float32)
    stream = fake.new_stream()
    wait(stream, at(counters))
    assert copy(at(y), at(x), 12, stream) == 0
    fake.driver.call("cuMemcpyDtoHAsync_v2", at(host), at(y), 12, stream)
    for _ in range(20):
        fake.progress()
    assert not y.any()
    assert not host.any()
    counters[0] = 1
    fake.driver.call("cuStreamSynchronize", stream)
    assert host.tolist() == y.tolist() == [1, 2, 3]


def test_nothing_is_executed_as_it_is_enqueued(fake: FakeGpu) -> None:
    for _ in range(50):
        x = filled([0])
        assert combine("add", x, [filled([1]), filled([2])], 0, 0) == 0
        assert x == [0]
        fake.synchronize()
        assert x == [3]


def test_host_memory_that_changes_too_early_is_noticed(fake: FakeGpu, counters: np.ndarray) -> None:
    x, host, stream = filled([0]), np.ones(1, np.float32), fake.new_stream()
    wait(stream, at(counters))
    fake.driver.call("cuMemcpyHtoDAsync_v2", at(x), at(host), 4, stream)
    host[0] = 2
    counters[0] = 1
    fake.synchronize(stream)
    assert x == [2]  # what a test of the library would find wrong


def test_a_copy_of_nothing_may_be_anywhere(fake: FakeGpu) -> None:
    assert copy(0, 0, 0, 0) == 0
    fake.synchronize()


def test_a_copy_that_overlaps_is_a_violation(fake: FakeGpu) -> None:
    x = filled([1, 2, 3])
    assert copy(at(x), at(x), 8, 0) == 0
    fake.check()
    assert copy(at(x, 1), at(x), 8, 0) == 0
    expect("it writes 8 bytes at .* which overlap what it reads")


@pytest.mark.parametrize("is_free", [False, True])
def test_memory_that_does_not_exist_ends_everything(fake: FakeGpu, is_free: bool) -> None:
    x, address = filled([1, 2]), fake.driver.allocate(8)
    event = fake.driver.new_event()
    if is_free:
        fake.driver.call("cuMemFree_v2", address)
    assert copy(at(x), address + (not is_free), 8, 0) == 700
    for _ in range(3):
        assert fake.driver.try_call("cuEventQuery", event) == 700
    with pytest.raises(DriverError, match="700"):
        fake.synchronize()
    assert fake.error == 700
    expect("which were freed" if is_free else "of which some are not in the same allocation")
    assert fake.driver.is_complete(event)
    if not is_free:
        fake.free(address)


def test_memory_that_is_freed_too_early_is_noticed(fake: FakeGpu, counters: np.ndarray) -> None:
    x, address, stream = filled([1, 2]), fake.allocate(8), fake.new_stream()
    wait(stream, at(counters))
    assert copy(address, at(x), 8, stream) == 0
    event = fake.driver.new_event()
    fake.driver.call("cuEventRecord", event, stream)
    fake.free(address)
    counters[0] = 1
    with pytest.raises(DriverError, match="700"):
        fake.synchronize(stream)
    assert fake.driver.try_call("cuEventQuery", event) == 700
    expect(f"stream {stream:#x}: a copy of 8 bytes, DtoD: it writes 8 bytes .* were freed")


def test_a_function_of_python_may_be_on_a_stream(fake: FakeGpu) -> None:
    x, stream = filled([1, 2]), fake.new_stream()
    fake.enqueue(stream, lambda: np.add(x, 1, out=x), [(at(x), x.nbytes, True)])
    assert x.tolist() == [1, 2]
    fake.synchronize(stream)
    assert x.tolist() == [2, 3]
    with pytest.raises(DriverError, match="700"):
        fake.enqueue(stream, lambda: None, [(at(x), x.nbytes + ALIGNMENT)])
    expect("cuLaunchHostFunc: a function: it reads")


def test_an_exception_on_a_stream_is_not_lost(fake: FakeGpu) -> None:
    fake.enqueue(0, lambda: 1 / 0)
    with pytest.raises(DriverError, match="719"):
        fake.synchronize()
    assert fake.driver.try_call("cuStreamSynchronize", 0) == 719
    expect("a function: ZeroDivisionError")


def test_an_exception_in_a_function_is_not_lost(fake: FakeGpu) -> None:
    assert fake.driver.try_call("cuMemAlloc_v2", None, 8) == 999
    expect("cuMemAlloc_v2: ValueError")


def test_no_warning_comes_from_a_stream(fake: FakeGpu) -> None:
    x = filled([3e38])
    assert combine("add", x, [x, x], 0, 0) == 0
    fake.synchronize()
    assert np.isinf(x)


# Streams


def order(seed: int) -> list[tuple[int, int]]:
    """In which order three streams execute: the numbers of the stream and of its operation."""
    reset(seed)
    done: list[tuple[int, int]] = []
    for which in range(3):
        stream = gpu().new_stream()
        for number in range(4):
            gpu().enqueue(stream, lambda which=which, number=number: done.append((which, number)))
    gpu().synchronize()
    return done


def test_the_seed_is_the_order() -> None:
    assert len({tuple(order(seed)) for seed in range(20)}) > 10
    assert order(7) == order(7)
    for seed in range(20):
        assert sorted(order(seed), key=lambda pair: pair[0]) == [
            (which, number) for which in range(3) for number in range(4)
        ]


def test_unknown_handles_are_refused(fake: FakeGpu) -> None:
    x, event = filled([1]), fake.driver.new_event()
    assert copy(at(x), at(x), 4, event) == 400
    for name in ("cuStreamSynchronize", "cuEventQuery", "cuEventDestroy_v2"):
        assert fake.driver.try_call(name, 17) == 400
    assert fake.driver.try_call("cuEventRecord", event, 17) == 400
    assert fake.driver.try_call("cuEventRecord", 17, 0) == 400
    assert fake.driver.try_call("cuStreamWaitEvent", 0, 17, 0) == 400
    assert launch(17, 0) == 400


def test_an_event_is_complete_when_what_precedes_it_is(fake: FakeGpu, counters: np.ndarray) -> None:
    stream, event = fake.new_stream(), fake.driver.new_event()
    assert fake.driver.is_complete(event)  # never recorded
    wait(stream, at(counters))
    fake.driver.call("cuEventRecord", event, stream)
    assert not any(fake.driver.is_complete(event) for _ in range(20))
    counters[0] = 1
    until(lambda: fake.driver.is_complete(event))
    wait(stream, at(counters), 2)
    fake.driver.call("cuEventRecord", event, stream)  # again
    assert not any(fake.driver.is_complete(event) for _ in range(20))
    fake.driver.call("cuEventDestroy_v2", event)
    assert fake.driver.try_call("cuEventQuery", event) == 400


def until(is_over: Callable[[], bool]) -> None:
    """Ask again and again, which lets time pass on the device."""
    for _ in range(1000):
        if is_over():
            return
    raise AssertionError("nothing happens")


def test_a_stream_waits_for_an_event(fake: FakeGpu, counters: np.ndarray) -> None:
    first, second, event = fake.new_stream(), fake.new_stream(), fake.driver.new_event()
    done: list[int] = []
    fake.driver.call("cuStreamWaitEvent", second, event, 0)  # never recorded: it passes
    fake.enqueue(second, lambda: done.append(1))
    wait(first, at(counters))
    fake.driver.call("cuEventRecord", event, first)
    fake.driver.call("cuStreamWaitEvent", second, event, 0)
    fake.enqueue(second, lambda: done.append(2))
    until(lambda: fake.progress() == 0 and bool(done))
    assert done == [1]
    counters[0] = 1
    fake.synchronize(second)
    assert done == [1, 2]


def test_counters_are_awaited_and_written(fake: FakeGpu, counters: np.ndarray) -> None:
    first, second = fake.new_stream(), fake.new_stream()
    done: list[int] = []
    assert batch(first, (WAIT_VALUE, at(counters), 5), (WRITE_VALUE, at(counters, 1), 6)) == 0
    fake.enqueue(first, lambda: done.append(1))
    assert batch(second, (WRITE_VALUE, at(counters), 4)) == 0
    fake.synchronize(second)
    assert done == []
    assert batch(second, (WRITE_VALUE, at(counters), 7), (WAIT_VALUE, at(counters, 1), 6)) == 0
    fake.synchronize()
    assert done == [1]
    assert counters[:3].tolist() == [7, 6, 0]


@pytest.mark.parametrize(
    ("word", "value", "is_reached"),
    [
        (2**32 - 1, 2**32 - 1, True),
        (1, 2**32 - 1, True),
        (2**32 - 1, 1, False),
        (2**31 - 1, 0, True),
        (2**31, 0, False),
        (0, 0, True),
    ],
)
def test_counters_are_cyclic(
    fake: FakeGpu, counters: np.ndarray, word: int, value: int, is_reached: bool
) -> None:
    counters[0], stream = word, fake.new_stream()
    wait(stream, at(counters), value)
    fake.limit = 0.01
    if is_reached:
        fake.synchronize(stream)
    else:
        with pytest.raises(DriverError, match="999"):
            fake.synchronize(stream)
        expect(rf"to reach {value} \(it is {word}\)")


def test_counters_must_be_page_locked(fake: FakeGpu, counters: np.ndarray) -> None:
    other = np.zeros(4, np.uint32)
    for kind in (WAIT_VALUE, WRITE_VALUE):
        assert batch(fake.new_stream(), (kind, at(other), 1)) == 700
        expect("is not in page-locked memory")
    assert batch(fake.new_stream(), (WRITE_VALUE, at(counters, len(counters)), 1)) == 700
    expect("is not in page-locked memory")
    assert not other.any()


def test_counters_must_stay_page_locked(fake: FakeGpu) -> None:
    words, stream = np.zeros(4, np.uint32), fake.new_stream()
    fake.driver.call("cuMemHostRegister_v2", at(words), words.nbytes, PORTABLE | MAPPED)
    wait(stream, at(words))
    fake.limit = 0.01
    assert fake.driver.try_call("cuMemHostUnregister", at(words)) == 999
    with pytest.raises(DriverError, match="700"):
        fake.synchronize()
    expect("cuMemHostUnregister waits for all streams(.|\n)*is not in page-locked memory")


def test_memory_is_page_locked_once(fake: FakeGpu, counters: np.ndarray) -> None:
    register, unregister = "cuMemHostRegister_v2", "cuMemHostUnregister"
    assert fake.driver.try_call(register, at(counters, 1), 4, PORTABLE | MAPPED) == 712
    assert fake.driver.try_call(unregister, at(counters, 1)) == 713


def test_memory_operations_that_do_not_exist_are_refused(counters: np.ndarray) -> None:
    good = WRITE_VALUE, at(counters), 1
    for bad in ((3, at(counters), 1), (WAIT_VALUE, at(counters), 1, 1), (2, at(counters) + 1, 1)):
        assert batch(0, good, bad) == 1
    assert batch(0, *[good] * 256) == 1  # CUDA wants less
    gpu().synchronize()
    assert not counters.any()


def test_a_full_queue_that_never_moves_is_a_violation(fake: FakeGpu, counters: np.ndarray) -> None:
    reset(queue_length=4)
    x, stream, other = filled([1]), fake.new_stream(), fake.new_stream()
    done: list[int] = []
    fake.enqueue(other, lambda: done.append(1))
    wait(stream, at(counters))
    for _ in range(3):
        assert copy(at(x), at(x), 4, stream) == 0
    fake.limit = 0.05
    assert copy(at(x), at(x), 4, stream) == 999
    assert done == [1]  # other streams went on
    expect(rf"the queue is full and nothing moves, and stream {stream:#x} waits for the word")


def test_a_full_queue_is_waited_for(fake: FakeGpu, counters: np.ndarray) -> None:
    reset(queue_length=2)
    x, stream = filled([0]), fake.new_stream()
    wait(stream, at(counters))
    timer = after(0.05, lambda: counters.fill(1))
    for _ in range(10):
        assert combine("add", x, [x, filled([1])], 0, stream) == 0
    assert counters[0] == 1
    timer.join()
    fake.synchronize(stream)
    assert x == [10]


def register_memory() -> int:
    return gpu().driver.try_call("cuMemHostRegister_v2", 1 << 12, 0, 3)


def open_something() -> int:
    handle = IpcHandle.from_buffer_copy(bytes(64))
    return gpu().driver.try_call("cuIpcOpenMemHandle_v2", None, handle, LAZY_PEER_ACCESS)


def load_kernel() -> int:
    gpu().kernels.unload()
    try:
        gpu().driver.kernels.combine("add", np.dtype(np.int8))
    except DriverError as error:
        return error.code
    return 0


HIDDEN: dict[str, Callable[[], int]] = {
    "cuMemAlloc_v2": lambda: gpu().driver.try_call("cuMemAlloc_v2", None, 0),
    "cuMemFree_v2": lambda: gpu().driver.try_call("cuMemFree_v2", 0),
    "cuIpcOpenMemHandle_v2": open_something,
    "cuIpcCloseMemHandle": lambda: gpu().driver.try_call("cuIpcCloseMemHandle", 0),
    "cuMemHostRegister_v2": register_memory,
    "the first request for the kernel add of int8": load_kernel,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_some_functions_wait_for_all_streams(
    fake: FakeGpu, counters: np.ndarray, name: str
) -> None:
    wait(fake.new_stream(), at(counters))
    fake.limit = 0.02
    assert HIDDEN[name]() == 999
    expect(f"{name} waits for all streams, and stream 0x.* waits for the word at")
    wait(fake.new_stream(), at(counters))
    fake.limit = 20
    timer = after(0.03, lambda: counters.fill(1))
    assert HIDDEN[name]() in (0, 1)  # it has waited; the arguments are wrong
    assert counters[0] == 1
    timer.join()


def test_a_kernel_is_loaded_once(fake: FakeGpu, counters: np.ndarray) -> None:
    load_kernel()
    wait(fake.new_stream(), at(counters))
    fake.limit = 0.02
    assert fake.driver.kernels.combine("add", np.dtype(np.int8)) is not None


def test_arrays_wait_for_no_stream(fake: FakeGpu, counters: np.ndarray) -> None:
    wait(fake.new_stream(), at(counters))
    fake.limit = 0.02
    x = fake.array(1 << 23, np.uint8)
    del x
    fake.free(fake.allocate(8))
    fake.check()


def test_a_stream_is_waited_for_alone(fake: FakeGpu, counters: np.ndarray) -> None:
    stream, other, x = fake.new_stream(), fake.new_stream(), filled([1])
    fake.limit = 0.02
    fake.driver.kernels.combine("add", x.dtype)  # the first time it waits
    wait(stream, at(counters))
    assert combine("add", x, [x, x], 0, other) == 0
    fake.driver.call("cuStreamSynchronize", other)
    assert x == [2]
    assert fake.driver.try_call("cuStreamSynchronize", stream) == 999
    expect(rf"cuStreamSynchronize waits for stream {stream:#x}, and stream {stream:#x} waits")


def test_a_thread_has_no_context_until_it_is_made_current(fake: FakeGpu) -> None:
    codes: list[int] = []
    address = fake.allocate(8)
    event = fake.driver.new_event()

    def use() -> None:
        driver = fake.driver
        codes.append(driver.try_call("cuEventRecord", event, 0))
        codes.append(driver.try_call("cuMemcpyDtoDAsync_v2", address, address, 8, 0))
        codes.append(driver.try_call("cuEventQuery", event))
        fake.make_current()
        codes.append(driver.try_call("cuEventRecord", event, 0))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(PATIENCE)
    assert codes == [201, 201, 0, 0]


def test_ranks_may_be_threads(fake: FakeGpu, counters: np.ndarray) -> None:
    """Two ranks add to each other's number in turn; each waits for its own stream only."""
    x, one, rounds = filled([0, 0]), filled([1]), 40
    gpu().driver.kernels.combine("add", x.dtype)
    failures: list[BaseException] = []

    def rank(me: int) -> None:
        try:
            fake.make_current()
            stream, peer = fake.new_stream(), 1 - me
            for number in range(1, rounds + 1):
                wait(stream, at(counters, peer), number - 1 + me)
                assert combine("add", x[me:][:1], [x[peer:][:1], one], 0, stream) == 0
                assert batch(stream, (WRITE_VALUE, at(counters, me), number)) == 0
            fake.synchronize(stream)
        except BaseException as error:  # noqa: BLE001 - for the test
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert failures == []
    assert x.tolist() == [2 * rounds - 1, 2 * rounds]


def test_a_destructor_may_call_the_driver(fake: FakeGpu) -> None:
    """Python may run one while an operation is executed; it executes nothing itself."""
    event, done = fake.driver.new_event(), []

    def operation() -> None:
        fake.driver.call("cuEventDestroy_v2", event)
        assert fake.progress() == 0
        done.append(1)

    fake.enqueue(0, operation)
    fake.enqueue(0, lambda: done.append(2))
    fake.synchronize()
    assert done == [1, 2]


def test_an_operation_must_not_wait(fake: FakeGpu) -> None:
    codes: list[int] = []
    fake.enqueue(0, lambda: codes.append(fake.driver.try_call("cuMemFree_v2", 0)))
    fake.enqueue(0, lambda: None)
    fake.synchronize()
    assert codes == [999]
    expect("cuMemFree_v2 waits for all streams, in an operation or a destructor")


def test_what_is_left_at_the_end_is_dropped(fake: FakeGpu, counters: np.ndarray) -> None:
    stream, event = fake.new_stream(), fake.driver.new_event()
    wait(stream, at(counters))
    fake.driver.call("cuEventRecord", event, stream)
    reset()
    assert fake.driver.is_complete(event)
    fake.synchronize(stream)


def test_violations_are_told_once(fake: FakeGpu) -> None:
    fake.violations += ["one", "two"]
    with pytest.raises(AssertionError, match="one\ntwo"):
        fake.check()
    fake.check()


# The order of streams


def copy_on(stream: int, target: np.ndarray, source: np.ndarray) -> None:
    assert copy(at(target), at(source), source.nbytes, stream) == 0


def by_nothing(first: int, second: int, word: int) -> None:
    pass


def by_an_event(first: int, second: int, word: int) -> None:
    event = gpu().driver.new_event()
    gpu().driver.call("cuEventRecord", event, first)
    gpu().driver.call("cuStreamWaitEvent", second, event, 0)


def by_a_word(first: int, second: int, word: int) -> None:
    write(first, word, 1)
    wait(second, word, 1)


def by_a_word_too_early(first: int, second: int, word: int) -> None:
    """It stands for what comes before the first write, not before the second."""
    write(first, word, 2)
    wait(second, word, 1)


def by_the_host(first: int, second: int, word: int) -> None:
    gpu().synchronize(first)


ORDERS = [by_an_event, by_a_word, by_a_word_too_early, by_the_host]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("what", ["write and read", "read and write", "write and write"])
def test_uses_of_memory_are_in_order(
    fake: FakeGpu, counters: np.ndarray, order: Callable[[int, int, int], None], what: str
) -> None:
    x, y, z = (fake.array(4, np.int64) for _ in range(3))
    first, second = fake.new_stream(), fake.new_stream()
    uses = {"write and read": [(x, y), (z, x)], "read and write": [(y, x), (x, z)]}
    (target, source), (later_target, later_source) = uses.get(what, [(x, y), (x, z)])
    copy_on(first, target, source)
    order(first, second, at(counters))
    copy_on(second, later_target, later_source)
    fake.synchronize()
    fake.check()


@pytest.mark.parametrize("what", ["write and read", "read and write", "write and write"])
def test_uses_of_memory_in_no_order_are_violations(fake: FakeGpu, what: str) -> None:
    """Whichever is executed first, and also if only a part is the same."""
    x, y, z = (fake.array(4, np.int64) for _ in range(3))
    uses = {"write and read": [(x, y), (z, x[2:])], "read and write": [(y, x), (x[:2], z[:2])]}
    for seed in range(4):
        reset(seed)
        first, second = fake.new_stream(), fake.new_stream()
        for stream, (target, source) in zip(
            (first, second), uses.get(what, [(x, y), (x, z)]), strict=True
        ):
            copy_on(stream, target[: source.size], source)
        fake.synchronize()
        expect("nothing orders a copy of .* on stream .*, which")


def test_two_reads_need_no_order(fake: FakeGpu) -> None:
    x, y, z = (fake.array(4, np.int64) for _ in range(3))
    copy_on(fake.new_stream(), y, x)
    copy_on(fake.new_stream(), z, x)
    fake.synchronize()
    fake.check()


def test_an_order_that_comes_too_late_is_a_violation(fake: FakeGpu, counters: np.ndarray) -> None:
    """A later write of the word may let the second stream go on, but an earlier one might."""
    x, y, z = (fake.array(4, np.int64) for _ in range(3))
    first, second = fake.new_stream(), fake.new_stream()
    write(first, at(counters), 1)
    copy_on(first, x, y)
    write(first, at(counters), 2)
    fake.synchronize(first)
    fake.races.host = {}  # as if the host had not waited
    wait(second, at(counters), 1)
    copy_on(second, z, x)
    fake.synchronize()
    expect("nothing orders")


def test_words_that_streams_write_do_not_go_back(fake: FakeGpu, counters: np.ndarray) -> None:
    stream = fake.new_stream()
    write(stream, at(counters), 2)
    write(stream, at(counters), 1)
    fake.synchronize()
    expect("goes back from 2 to 1")


def test_two_streams_that_write_a_word_are_in_order(fake: FakeGpu, counters: np.ndarray) -> None:
    for value in (1, 2):
        write(fake.new_stream(), at(counters), value)
        fake.execute(1)
    fake.synchronize()
    expect("in no order")


def test_memory_that_is_new_was_not_used(fake: FakeGpu) -> None:
    x = fake.array(4, np.int64)
    copy_on(fake.new_stream(), x, fake.array(4, np.int64))
    fake.synchronize()
    fake.races.host = {}
    address = x.ctypes.data
    del x
    x = fake.array(4, np.int64)
    assert x.ctypes.data == address
    copy_on(fake.new_stream(), x, fake.array(4, np.int64))
    fake.synchronize()
    fake.check()


# Kernels


def test_operands_are_combined_in_their_order(fake: FakeGpu) -> None:
    """The maximum of 0.0 and -0.0 is one of both, by the order."""
    zeros = [filled(value) for value in ([0.0], [-0.0])]
    for lefts, pair in ((0b00, zeros), (0b10, zeros[::-1])):
        x = filled([1])
        assert combine("maximum", x, zeros, lefts, 0) == 0
        fake.synchronize()
        assert np.signbit(x) == np.signbit(np.maximum(*pair))


def test_every_combination_is_rounded(fake: FakeGpu) -> None:
    values = [1e8, 3.0, -1e8, 3.0, 1e8, -1e8, 5.0, 0.125]
    operands, x = [filled([value]) for value in values], filled([0])
    assert combine("add", x, operands, 0b01010100, 0) == 0
    fake.synchronize()
    want = np.float32(values[0])
    for value in values[1:]:
        want = want + np.float32(value)
    assert x == [want]


def test_the_result_may_be_an_operand(fake: FakeGpu) -> None:
    x, y = filled([1, 2], np.int32), filled([10, 20], np.int32)
    assert combine("add", x, [y, y, x], 0, 0) == 0
    fake.synchronize()
    assert x.tolist() == [21, 42]
    fake.check()
    assert (
        launch(
            fake.driver.kernels.combine("add", x.dtype),
            0,
            at(x, 1),
            0,
            2,
            1,
            at(x),
            at(y),
            *[0] * 6,
        )
        == 0
    )
    fake.check()  # beside each other


def test_an_operand_must_not_overlap_the_result(fake: FakeGpu) -> None:
    x = filled([1, 2, 3], np.int32)
    kernel = fake.driver.kernels.combine("add", x.dtype)
    assert launch(kernel, 0, at(x, 1), 0, 2, 2, at(x), at(x), *[0] * 6) == 0
    expect("which overlap what it reads")


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", ml_dtypes.bfloat16])
def test_numbers_are_divided(fake: FakeGpu, dtype: Any) -> None:
    x = filled([6, 9, -3], dtype)
    assert launch(fake.driver.kernels.divide(x.dtype), 0, at(x), 3, 3) == 0
    fake.synchronize()
    assert x.tolist() == [2, 3, -1]


def test_parameters_that_are_wrong_are_refused(fake: FakeGpu) -> None:
    x = filled([1])
    kernel = fake.driver.kernels.combine("add", x.dtype)
    assert launch(kernel, 0, at(x), 0, 9, 1, *[at(x)] * 8) == 1
    assert launch(kernel, 0, at(x), 0, 0, 1, *[at(x)] * 8) == 1
    assert launch(kernel, 0, at(x), 0, 2, 2**30, *[at(x)] * 8) == 700
    expect("add of 2 operands of float32: it writes")
    grid = (0, 1, 1, 256, 1, 1, 0)
    assert fake.driver.try_call("cuLaunchKernel", kernel, *grid, 0, at(x), 0) == 1


def test_a_gpu_has_no_kernel_for_everything() -> None:
    kernels = gpu().driver.kernels
    for dtype in ("g", "G", ">f4", "S3", "M8[s]", ml_dtypes.float8_e4m3fn):
        assert kernels.combine("add", np.dtype(dtype)) is None
        assert kernels.divide(np.dtype(dtype)) is None
    assert kernels.combine("minimum", np.dtype("c8")) is None
    assert kernels.combine("bitwise_or", np.dtype("f4")) is None
    assert kernels.combine("arctan2", np.dtype("f4")) is None
    assert kernels.divide(np.dtype("i4")) is None
    assert kernels.combine("bitwise_or", np.dtype("?")) is not None
    assert kernels.combine("add", np.dtype(ml_dtypes.bfloat16)) is not None


# Two processes


class Peer:
    """Another process with a GPU of its own, which does what it is asked."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )

    def __call__(self, name: str, *arguments: Any) -> Any:
        """What one of `COMMANDS` returns in that process."""
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], PATIENCE)[0], "no answer"
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        """Let it end; it must, and without an error."""
        try:
            self.process.communicate(timeout=PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()


def allocate(size: int, byte: int) -> tuple[int, str]:
    """The address and the handle of new memory that consists of one byte."""
    address = gpu().driver.allocate(size)
    gpu().memory.view(address, size)[...] = byte
    return address, gpu().driver.handle(address).hex()


def opened(handle: str) -> tuple[int, int]:
    """The error code, and the address."""
    address, given = ctypes.c_int64(), IpcHandle.from_buffer_copy(bytes.fromhex(handle))
    pointer = ctypes.addressof(address)
    code = gpu().driver.try_call("cuIpcOpenMemHandle_v2", pointer, given, LAZY_PEER_ACCESS)
    return code, address.value


def close(address: int) -> int:
    return gpu().driver.try_call("cuIpcCloseMemHandle", address)


def free(address: int) -> int:
    return gpu().driver.try_call("cuMemFree_v2", address)


def copied(source: int, size: int) -> tuple[int, str]:
    """The error code of a copy out of memory, and what was copied."""
    target = gpu().array(size, np.uint8)
    code = copy(at(target), source, size, 0)
    if not code:
        code = gpu().driver.try_call("cuStreamSynchronize", 0)
    return code, target.tobytes().hex()


def written(target: int) -> int:
    x = filled([1])
    return copy(target, at(x), 4, 0)


def violations() -> list[str]:
    found = list(gpu().violations)
    gpu().violations.clear()
    reset()
    return found


def fork() -> int:
    """The exit status of a forked process that has looked at its own GPU."""
    parents, x = gpu(), filled([1])
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        return status
    try:
        gpu().make_current()
        y = filled([2])
        is_own = gpu() is not parents and copied(at(y), 4)[0] == 0 and copied(at(x), 4)[0] == 700
    finally:
        os._exit(0 if is_own else 1)


COMMANDS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (allocate, opened, close, free, copied, written, violations, fork)
}


@pytest.fixture(scope="module")
def other() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.end()
    assert peer.process.returncode == 0


@pytest.fixture
def peer(other: Peer) -> Iterator[Peer]:
    yield other
    assert other("violations") == []


def test_memory_of_a_peer_is_read(peer: Peer, fake: FakeGpu) -> None:
    address, handle = peer("allocate", 1000, 7)
    code, here = opened(handle)
    assert code == 0
    assert copied(here + 10, 4) == (0, "07070707")
    assert fake.driver.allocation(here + 999) == (here, 1000)
    assert fake.driver.buffer_id(here) != fake.driver.buffer_id(at(filled([1])))
    assert close(here) == 0
    assert peer("free", address) == 0


def test_a_peer_reads_memory_of_this_process(peer: Peer, fake: FakeGpu) -> None:
    x = filled([7, 8], np.uint8)
    base, _ = fake.driver.allocation(at(x))
    code, there = peer("opened", fake.driver.handle(at(x)).hex())
    assert code == 0
    assert peer("copied", there + at(x) - base, 2) == [0, "0708"]
    x[...] = 9
    assert peer("copied", there + at(x) - base, 2) == [0, "0909"]
    assert peer("close", there) == 0


def test_a_kernel_reads_memory_of_a_peer(peer: Peer, fake: FakeGpu) -> None:
    address, handle = peer("allocate", 8, 1)
    code, here = opened(handle)
    x = filled([1, 2], np.uint32)
    assert (
        launch(
            fake.driver.kernels.combine("add", x.dtype), 0, at(x), 0, 2, 2, at(x), here, *[0] * 6
        )
        == code
        == 0
    )
    fake.synchronize()
    assert x.tolist() == [0x01010102, 0x01010103]
    assert close(here) == peer("free", address) == 0


def test_some_handles_are_refused(peer: Peer, fake: FakeGpu) -> None:
    assert opened(bytes(64).hex()) == (1, 0)
    assert opened(fake.driver.handle(at(filled([1]))).hex()) == (201, 0)
    address, handle = peer("allocate", 8, 1)
    (code, here), twice = opened(handle), opened(handle)
    assert (code, twice) == (0, (208, 0))
    with pytest.raises(DriverError, match="error 1"):
        fake.driver.handle(here)
    assert close(here) == peer("free", address) == 0
    assert opened(handle) == (1, 0)
    again, new = peer("allocate", 8, 2)  # in the same place
    assert again == address
    assert opened(handle) == (1, 0)
    code, here = opened(new)
    assert (code, copied(here, 1)) == (0, (0, "02"))
    assert close(here) == peer("free", address) == 0


def test_memory_is_closed_once(peer: Peer, fake: FakeGpu) -> None:
    address, handle = peer("allocate", 8, 1)
    _, here = opened(handle)
    assert fake.driver.try_call("cuMemFree_v2", here) == 1
    assert (close(here + 1), close(address), close(here), close(here)) == (1, 1, 0, 1)
    assert peer("free", address) == 0


def test_memory_of_a_peer_cannot_be_used_after_it_is_closed(peer: Peer) -> None:
    address, handle = peer("allocate", 8, 1)
    _, here = opened(handle)
    assert close(here) == 0
    assert copied(here, 4)[0] == 700
    expect("it reads 4 bytes .* which were closed")
    assert peer("free", address) == 0


def test_memory_of_a_peer_is_not_written(peer: Peer) -> None:
    address, handle = peer("allocate", 8, 1)
    _, here = opened(handle)
    assert written(here) == 700
    expect(f"which are memory of process {peer.process.pid}")
    assert copied(here, 1) == (0, "01")
    assert close(here) == peer("free", address) == 0


def test_memory_is_not_freed_while_a_peer_has_it_open(peer: Peer) -> None:
    address, handle = peer("allocate", 8, 1)
    _, here = opened(handle)
    assert peer("free", address) == 0
    assert peer("violations") == [f"memory was freed that process {os.getpid()} has open"]
    assert copied(here, 4)[0] == 700
    expect(f"which process {peer.process.pid} has freed")
    again, _ = peer("allocate", 8, 2)  # it is other memory, in the same place
    assert again == address
    assert copied(here, 4)[0] == 700
    expect(f"which process {peer.process.pid} has freed")
    assert close(here) == peer("free", again) == 0


def test_what_is_closed_late_closes_nothing_else(peer: Peer) -> None:
    old, handle = peer("allocate", 8, 1)
    _, first = opened(handle)
    neighbour, _ = peer("allocate", 8, 1)
    assert peer("free", old) == 0
    assert len(peer("violations")) == 1
    new, handle = peer("allocate", 1 << 22, 2)  # with the row of the old one, in another place
    code, second = opened(handle)
    assert (code, close(first)) == (0, 0)
    assert peer("free", new) == 0
    assert len(peer("violations")) == 1
    assert close(second) == peer("free", neighbour) == 0


def test_a_pool_that_gives_open_memory_up_is_a_violation(peer: Peer, fake: FakeGpu) -> None:
    x = fake.array(1 << 22, np.uint8)
    _, there = peer("opened", fake.driver.handle(at(x)).hex())
    del x
    fake.progress()
    fake.check()  # an array may go: its allocation stays
    fake.trim()
    expect(f"memory was freed that process {peer.process.pid} has open")
    assert peer("close", there) == 0


def test_a_forked_process_has_its_own_gpu(peer: Peer) -> None:
    assert peer("fork") == 0


def test_a_peer_is_killed(fake: FakeGpu) -> None:
    """What it had stays readable, as on a GPU; it has nothing open any more."""
    peer, mine = Peer(), fake.allocate(8)
    try:
        _, handle = peer("allocate", 8, 1)
        assert peer("opened", fake.driver.handle(mine).hex())[0] == 0
        _, here = opened(handle)
        peer.process.kill()
        deadline = time.monotonic() + PATIENCE
        while is_alive(peer.process.pid) and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        peer.process.kill()
        peer.process.communicate()
    assert copied(here, 1) == (0, "01")
    assert close(here) == 0
    assert opened(handle) == (1, 0)
    fake.free(mine)
    fake.check()


def serve() -> None:
    """Answer until nobody asks any more."""
    gpu().make_current()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(COMMANDS[name](*arguments)), flush=True)


if __name__ == "__main__":
    serve()
