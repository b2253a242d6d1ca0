"""Arrays of a device that is not there: what crosses, and where the host waits, is counted.

The host cannot look into one by mistake.  Where it does so on purpose it would wait for a device:
to get contents, a number or a truth value, and to know how many elements a mask has.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from array_api_compat import numpy as host

from collectives.arrays.backends import register_backend
from parallel.commands import presets
from tests.fakes.device import FakeBackend

PACKAGES = "parallel.", "moe.", "examples."


class FakeArray:
    """A device's array: the host sees neither its elements nor gets them by mistake.

    Mixing it with NumPy's arrays, and every implicit conversion, raises TypeError, as CuPy's do.
    """

    __array_ufunc__ = None  # so NumPy's operators do not take it either

    def __init__(self, memory: np.ndarray, base: FakeArray | None = None) -> None:
        self.memory, self.base = memory, base

    shape = property(lambda self: self.memory.shape)
    dtype = property(lambda self: self.memory.dtype)
    size = property(lambda self: self.memory.size)
    ndim = property(lambda self: self.memory.ndim)
    nbytes = property(lambda self: self.memory.nbytes)
    flags = property(lambda self: self.memory.flags)
    T = property(lambda self: wrap(self.memory.T, self))
    device = "fake"

    def __array__(self, *args: Any, **more: Any) -> np.ndarray:
        raise TypeError("implicit conversion to a NumPy array")

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return FAKE

    def astype(self, dtype: Any, order: str = "K") -> FakeArray:
        return FakeArray(self.memory.astype(dtype, order))

    def reshape(self, *shape: int) -> FakeArray:
        return wrap(self.memory.reshape(*shape), self)

    def view(self, dtype: Any) -> FakeArray:
        return wrap(self.memory.view(dtype), self)

    def __getitem__(self, index: Any) -> FakeArray:
        note_masks(index)
        return wrap(self.memory[bare(index)], self)

    def __setitem__(self, index: Any, value: Any) -> None:
        note_masks(index)
        self.memory[bare(index)] = on_device_only(value)

    def __iter__(self) -> Iterator[FakeArray]:
        return (self[i] for i in range(len(self.memory)))

    def copy(self) -> FakeArray:
        return FakeArray(self.memory.copy())

    # What a host waits for

    def __float__(self) -> float:
        note_wait()
        return float(self.memory)

    def __int__(self) -> int:
        note_wait()
        return int(self.memory)

    def __bool__(self) -> bool:
        note_wait()
        return bool(self.memory)

    # The two ways that are meant

    def get(self, *, out: np.ndarray | None = None) -> np.ndarray:
        out = np.empty(self.shape, self.dtype) if out is None else out
        assert out.shape == self.shape and out.dtype == self.dtype and type(out) is np.ndarray
        note_wait()
        crossed()["get"] += out.nbytes
        out[...] = self.memory
        return out

    def set(self, values: np.ndarray) -> None:
        assert values.shape == self.shape and values.dtype == self.dtype
        crossed()["set"] += values.nbytes
        self.memory[...] = values


CROSSED: defaultdict[int, Counter[str]] = defaultdict(Counter)


def crossed() -> Counter[str]:
    """The bytes that this rank, a thread, has brought over, by way."""
    return CROSSED[threading.get_ident()]


WAITS: defaultdict[int, Counter[str]] = defaultdict(Counter)


def waits() -> Counter[str]:
    """How often this rank, a thread, has waited for the device, by function of the packages."""
    return WAITS[threading.get_ident()]


def note_wait() -> None:
    """Count a wait in the function that has asked; `on_host` only hands on."""
    frame = sys._getframe(1)
    while frame is not None:
        name, function = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        if name.startswith(PACKAGES) and not function.endswith("on_host"):
            waits()[function] += 1
            return
        frame = frame.f_back  # type: ignore[assignment]
    waits()["a test"] += 1


def note_masks(index: Any) -> None:
    """To index by a mask is to wait for the number of its elements."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, FakeArray) and part.dtype == bool for part in parts):
        note_wait()


def on_device_only(x: Any) -> Any:
    """What the device computes with; TypeError for an array that is on the host."""
    if isinstance(x, np.ndarray):
        raise TypeError("an array of NumPy's among the device's")
    if isinstance(x, list | tuple):
        return type(x)(map(on_device_only, x))
    return bare(x)


def bare(x: Any) -> Any:
    """The test's own way to look into it."""
    return x.memory if isinstance(x, FakeArray) else x


def wrap(result: Any, *operands: Any) -> FakeArray:
    """On the device; a view of the operand whose memory it is in, if of any."""
    for x in operands:
        if isinstance(x, FakeArray) and np.may_share_memory(result, x.memory):
            return FakeArray(result, x if x.base is None else x.base)
    return FakeArray(np.asarray(result))


def on_device(function: Callable[..., Any]) -> Callable[..., FakeArray]:
    def call(*operands: Any, **options: Any) -> FakeArray:
        options.pop("device", None)
        given = {name: bare(value) for name, value in options.items()}
        return wrap(function(*map(on_device_only, operands), **given), *operands)

    return call


def reflected(function: Callable[..., Any]) -> Callable[..., FakeArray]:
    return lambda self, other: on_device(function)(other, self)


def in_place(function: Callable[..., Any]) -> Callable[..., FakeArray]:
    def call(self: FakeArray, other: Any) -> FakeArray:
        function(self.memory, on_device_only(other))
        return self

    return call


for name in (
    "matmul",
    "pow",
    "neg",
    "eq",
    "ne",
    "lt",
    "le",
    "ge",
    "gt",
    "lshift",
    "rshift",
    "xor",
    "and_",
    "or_",
    "invert",
):
    setattr(FakeArray, f"__{name.strip('_')}__", on_device(getattr(operator, name)))
FakeArray.__ior__ = in_place(operator.ior)  # type: ignore[attr-defined]
for name in ("add", "sub", "mul", "truediv"):
    setattr(FakeArray, f"__{name}__", on_device(getattr(operator, name)))
    setattr(FakeArray, f"__r{name}__", reflected(getattr(operator, name)))
    setattr(FakeArray, f"__i{name}__", in_place(getattr(operator, f"i{name}")))


class FakeNamespace:
    """The functions of the array API, on the device."""

    __name__ = "fake"  # array_api_compat tells namespaces apart by it

    def __getattr__(self, name: str) -> Any:
        return on_device(getattr(host, name))

    def asarray(self, x: Any, **options: Any) -> FakeArray:
        crossed()["asarray"] += x.nbytes if isinstance(x, np.ndarray) else 0
        return FakeArray(np.array(x, **options))


FAKE = FakeNamespace()


class Backend(FakeBackend):
    """By which the library sends these arrays."""

    name = kind = "fake, with arithmetic"
    driver = None  # the arrays are in memory of the host

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return FakeArray(np.empty(shape, dtype))

    def contiguous(self, x: Any) -> Any:
        same = np.ascontiguousarray(x.memory)
        return x if same is x.memory else FakeArray(same)


register_backend(FakeArray, Backend())  # type: ignore[arg-type]


def use_as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let training commands train on this device, whatever their options say."""
    monkeypatch.setattr(presets, "device_namespace", lambda device, comm: FAKE)
