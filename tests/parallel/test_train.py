"""The training program, on threads as ranks: what it shows, writes and returns."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import text
from parallel.data import DataParallel
from parallel.show import console_of
from parallel.train import Training, parser

ROOT = Path(__file__).parent.parent.parent
TEXT = argparse.__file__  # a hundred thousand bytes or so, quickly read
SMALL = ["--text", TEXT, "--hidden", "8", "--context", "4", "--batch", "9", "--steps", "3"]


def options_of(*words: str) -> argparse.Namespace:
    return parser().parse_args(words)


def training(*words: str, comm: Communicator) -> Training:
    return Training(comm, options_of(*words), console_of(comm.rank))


def losses(*words: str, ranks: int) -> list[float]:
    """Rank 0's, of a whole run."""

    def fn(comm: Communicator) -> list[float]:
        run = training(*words, comm=comm)
        run.run()
        return run.losses

    return list(collectives.run(fn, size=ranks)[0])


def status(*words: str, ranks: int) -> int | None:
    """Rank 0's exit status, after a whole run and its report."""

    def fn(comm: Communicator) -> int | None:
        run = training(*words, comm=comm)
        table = run.run()
        return None if table is None else run.report(table)

    return collectives.run(fn, size=ranks)[0]


@pytest.mark.parametrize(
    ("dtype", "steps", "close"), [("float64", 200, 1e-9), ("float32", 20, 1e-5)]
)
def test_four_ranks_train_as_one_does(dtype: str, steps: int, close: float) -> None:
    words = [
        "--text",
        TEXT,
        "--hidden",
        "64",
        "--batch",
        "50",
        "--steps",
        str(steps),
        "--dtype",
        dtype,
    ]
    one = losses("--strategy", "serial", *words, ranks=1)
    np.testing.assert_allclose(losses(*words, ranks=4), one, rtol=close)


def test_the_model_learns_more_than_the_frequencies_of_bytes() -> None:
    last = losses("--hidden", "64", "--batch", "64", ranks=1)[-20:]
    assert np.mean(last) < text.unigram_entropy(text.load()) - 0.4


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    assert status(*SMALL, "--json", str(file), ranks=2) == 0
    said = capsys.readouterr().out
    for words in (
        "step     3",
        "unigram entropy",
        "tokens/s",
        "backward/block1",
        "predicted = rec",
    ):
        assert words in said
    written = json.loads(file.read_text())
    assert len(written["losses"]) == written["steps"] == 3
    assert written["unigram_entropy"] == text.unigram_entropy(text.load(TEXT))
    assert {row["phase"] for row in written["traffic"]["rows"]} >= {"start", "loss"}
    assert np.shape(written["traffic"]["matrix"]) == (2, 2)


def test_traffic_that_differs_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DataParallel, "traffic", lambda self, steps: [])
    assert status(*SMALL, ranks=2) == 1
    assert "TrafficMismatch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "ranks", "sentence"),
    [
        (["--batch", "2"], 3, "a global batch of 2 cannot be divided among 3 ranks"),
        (["--strategy", "serial"], 2, "the serial strategy runs on one rank, not on 2"),
        (["--text", "/no/such/text"], 1, "no text in /no/such/text"),
        (["--text", __file__, "--context", "1000000"], 1, "too short for a context of 1000000"),
    ],
)
def test_refusals(words: list[str], ranks: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        losses(*words, ranks=ranks)


def test_without_rich_one_sentence_says_what_to_install() -> None:
    program = "import sys; sys.modules['rich'] = None; import parallel; import parallel.train"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "pip install 'ring-collectives[bench]'" in done.stderr
    assert "parallel/train.py" in done.stderr  # `import parallel` alone needs no rich
