"""Sizes as people write them, and the series of them."""

from __future__ import annotations

import argparse

import pytest

from bench.workloads.sizes import memory, parse, series, text, whole_blocks


@pytest.mark.parametrize(
    ("text", "wanted"), [("8", 8), ("64K", 65536), ("64k", 65536), ("3M", 3 << 20), ("1G", 1 << 30)]
)
def test_sizes_are_read_from_text(text, wanted):
    assert parse(text) == wanted


@pytest.mark.parametrize("text", ["", "K", "0", "-8", "1.5K", "8KB", "1T", "eight"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size such as"):
        parse(text)


def test_more_than_there_is_memory_is_refused():
    with pytest.raises(argparse.ArgumentTypeError, match=r"99999G is more than the \d+ bytes"):
        parse("99999G")
    with pytest.raises(argparse.ArgumentTypeError, match="bytes of memory here"):
        parse(str(memory() + 1))
    assert parse(str(memory())) == memory()


@pytest.mark.parametrize(
    ("size", "wanted"),
    [(8, "8 B"), (0, "0 B"), (1000, "1000 B"), (1536 << 10, "1536 KiB"), (64 << 20, "64 MiB")],
)
def test_sizes_are_written_as_text(size, wanted):
    assert text(size) == wanted


def test_a_series_has_no_greater_size_than_the_last():
    assert series(8, 100, factor=4) == [8, 32]
    assert series(8, 128, factor=4) == [8, 32, 128]
    assert series(8, 8, factor=2) == [8]
    assert series(8, 600) == [8, 64, 512]


def test_a_step_in_bytes_is_added():
    assert series(8, 33, step=8) == [8, 16, 24, 32]
    assert series(8, 8, step=100) == [8]


def test_a_series_without_a_size_is_refused():
    with pytest.raises(ValueError, match="greater than the greatest"):
        series(9, 8)


def test_elements_are_rounded_up_to_whole_blocks():
    assert whole_blocks(8, itemsize=4, num_blocks=1) == 2
    assert whole_blocks(8, itemsize=4, num_blocks=3) == 3
    assert whole_blocks(1, itemsize=8, num_blocks=1) == 1
