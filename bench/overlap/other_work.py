"""The work that an all-reduce is overlapped with: a matrix product, a sleep, a Python loop."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np

FP32 = np.dtype("float32")
SLICES = 16


class Other(ABC):
    """What an all-reduce is overlapped with, in an amount that is a multiple of `SLICES`."""

    name: ClassVar[str]
    words: ClassVar[str]  # before the amount
    trial: ClassVar[int]  # the amount that is tried first
    power: ClassVar[int] = 1  # of the amount, that its time grows with

    def __init__(self, amount: int) -> None:
        self.amount = amount

    def run(self, slices: int = 1, after: Callable[[], object] | None = None) -> None:
        """Do it in so many slices, and call `after` after each."""
        for number in range(slices):
            self.do_slice(number, slices)
            if after is not None:
                after()

    @abstractmethod
    def do_slice(self, number: int, slices: int) -> None:
        """Do one of the slices."""


class Product(Other):
    """The product of two square matrices; the amount is their order."""

    name, words, trial, power = "product", "product of two matrices of order", 512, 3

    def __init__(self, amount: int) -> None:
        super().__init__(amount)
        self.left, self.right = np.ones((2, amount, amount), FP32)
        self.out = np.empty_like(self.left)

    def do_slice(self, number: int, slices: int) -> None:
        rows = self.amount // slices
        mine = slice(number * rows, (number + 1) * rows)
        np.matmul(self.left[mine], self.right, out=self.out[mine])


class Sleep(Other):
    """A sleep; the amount is in microseconds."""

    name, words, trial = "sleep", "sleep in microseconds:", 1024

    def do_slice(self, number: int, slices: int) -> None:
        time.sleep(self.amount / slices * 1e-6)


class Loop(Other):
    """A loop of Python instructions, which holds the interpreter; the amount is its turns."""

    name, words, trial = "loop", "turns of a Python loop:", 1 << 15

    def do_slice(self, number: int, slices: int) -> None:
        for _ in range(self.amount // slices):
            pass


KINDS: dict[str, type[Other]] = {kind.name: kind for kind in (Product, Sleep, Loop)}
