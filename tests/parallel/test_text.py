"""The text, its entropy, and batches that no division among ranks can change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from parallel import text

DATA = np.frombuffer(bytes(range(256)) * 40, dtype=np.uint8)


def test_the_standard_library_is_there_and_large() -> None:
    files = text.library_files()
    assert not any({"site-packages", "test", "tests"} & set(file.parts[-3:]) for file in files)
    data = text.load()
    assert data.dtype == np.uint8 and len(data) > 3_000_000
    assert 2.5 < text.unigram_entropy(data) < 4


def test_a_directory_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, content in {"c": "3", "b/z": "2", "a": "1"}.items():
        (tmp_path / name).write_text(content)
    assert text.load(tmp_path).tobytes() == b"123"
    assert text.load(tmp_path / "b" / "z").tobytes() == b"2"


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_no_text_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="no text in"):
        text.load(tmp_path / name)


def test_the_unigram_entropy_is_that_of_the_frequencies() -> None:
    assert text.unigram_entropy(DATA) == pytest.approx(np.log(256), rel=1e-14)
    assert text.unigram_entropy(np.zeros(9, np.uint8)) == 0
    halves = np.frombuffer(b"aab" * 10, dtype=np.uint8)
    assert text.unigram_entropy(halves) == pytest.approx(np.log(3) - 2 / 3 * np.log(2), rel=1e-14)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("total", [8, 9, 31, 256])
def test_shares_cover_the_batch_and_differ_by_at_most_one(total: int, ranks: int) -> None:
    parts = [range(total)[text.share(total, ranks, rank)] for rank in range(ranks)]
    assert [i for part in parts for i in part] == list(range(total))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_more_ranks_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="a global batch of 3 cannot be divided among 4 ranks"):
        text.share(3, 4, 0)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_divide_the_same_batch(ranks: int) -> None:
    inputs, targets = text.batch(DATA, seed=1, step=2, batch_size=13, context=4)
    parts = [
        text.batch(DATA, seed=1, step=2, batch_size=13, context=4, rank=rank, num_ranks=ranks)
        for rank in range(ranks)
    ]
    np.testing.assert_array_equal(np.concatenate([p[0] for p in parts]), inputs)
    np.testing.assert_array_equal(np.concatenate([p[1] for p in parts]), targets)


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="a global batch of 3 cannot be divided among 4 ranks"):
        text.batch(DATA, seed=0, step=0, batch_size=3, context=4, rank=3, num_ranks=4)


@pytest.mark.parametrize("context", [1, 4])
def test_targets_are_the_bytes_that_follow(context: int) -> None:
    inputs, targets = text.batch(DATA, seed=1, step=2, batch_size=50, context=context)
    assert inputs.shape == targets.shape == (50, context)
    assert inputs.dtype == targets.dtype == np.int64
    first = inputs[:, :1]  # DATA counts, so what follows a byte is known
    np.testing.assert_array_equal(inputs, (first + np.arange(context)) % 256)
    np.testing.assert_array_equal(targets, (inputs + 1) % 256)


def test_every_window_can_be_drawn_and_no_other() -> None:
    data = np.arange(6, dtype=np.uint8)
    inputs, targets = text.batch(data, seed=0, step=0, batch_size=200, context=4)
    assert {tuple(row) for row in inputs.tolist()} == {(0, 1, 2, 3), (1, 2, 3, 4)}
    assert {tuple(row) for row in targets.tolist()} == {(1, 2, 3, 4), (2, 3, 4, 5)}


def test_a_batch_does_not_look_into_the_text() -> None:
    """What is changed in a batch is not changed in the text."""
    data = DATA.copy()
    for part in text.batch(data, seed=0, step=0, batch_size=3, context=4):
        part[...] = 0
    np.testing.assert_array_equal(data, DATA)


def test_batches_differ_by_seed_and_step() -> None:
    def drawn(seed: int, step: int) -> bytes:
        return text.batch(DATA, seed=seed, step=step, batch_size=9, context=4)[0].tobytes()

    assert drawn(1, 2) == drawn(1, 2)
    assert len({drawn(seed, step) for seed in range(3) for step in range(3)}) == 9


def test_a_text_without_one_window_is_refused() -> None:
    with pytest.raises(ValueError, match="a text of 4 bytes is too short for a context of 4"):
        text.batch(DATA[:4], seed=0, step=0, batch_size=1, context=4)
