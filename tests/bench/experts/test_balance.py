"""Balancing schemes beside none: what is measured of a run, what is said of several, the files."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bench.__main__ import main
from bench.experts.balance import chosen
from bench.experts.balance_picture import picture
from bench.experts.balance_runs import SCHEMES, Course, Run, Scheme, Settings, baseline, train
from bench.experts.balance_summary import summaries
from docs.generate import experts
from moe import GATES, Gate
from moe.gates import Chosen, SelectionInput
from moe.gates.selections import by_choice
from parallel import text

SMALL = Settings(steps=3, last=2, num_experts=4, num_layers=2, hidden=8, rows=2, context=16)
WORDS = [
    "--steps",
    "2",
    "--seeds",
    "2",
    "--experts",
    "4",
    "--hidden",
    "8",
    "--batch",
    "2",
    "--context",
    "16",
]


@pytest.fixture(scope="module")
def data() -> text.Bytes:
    return text.load(__file__)


def to_first(group: SelectionInput) -> Chosen:
    return by_choice(np.zeros((len(group.scores), 1), np.int64))


def test_one_expert_for_all_is_as_uneven_as_can_be(data: text.Bytes) -> None:
    """The negative control: the imbalance is the number of experts; expert choice has 1."""
    forced = train(Scheme("forced", 1, partial(Gate, selection=to_first)), 0, SMALL, data)
    assert forced.imbalance == [4.0] * 3
    last = forced.run(2).measures
    assert last[:4] == (4.0, 4.0, 0.0, 0.0)
    even = train(Scheme("even", 2, GATES["expert-choice"]), 0, SMALL, data).run(2).measures
    assert even[:4] == (1.0, 1.0, 1.0, 0.0)


def test_dropped_choices_count_as_choices_and_not_as_load(data: text.Bytes) -> None:
    """All tokens to one expert that takes a quarter of them."""
    tight = Scheme("tight", 1, partial(Gate, selection=to_first, rule="switch"))
    last = train(tight, 0, SMALL, data).run(2).measures
    assert last[:4] == (4.0, 4.0, 0.0, 0.75)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.slow
def test_every_scheme_is_measured(scheme: Scheme, data: text.Bytes) -> None:
    """Choices are those of all tokens and blocks; a run is a function of its seed."""
    course = train(scheme, 1, SMALL, data)
    assert course.choices.shape == course.load.shape == (3, 2, 4)
    assert (course.choices.sum(axis=-1) == scheme.k * 2 * 16).all()
    assert (course.load <= course.choices).all()
    again = train(scheme, 1, SMALL, data)
    assert again.loss == course.loss and (again.choices == course.choices).all()
    assert train(scheme, 2, SMALL, data).loss != course.loss


def test_the_loss_is_that_of_the_model_alone(data: text.Bytes) -> None:
    """An auxiliary loss of great weight, added in training, is no part of it."""
    heavy = partial(GATES["switch"], weight=1000.0)
    settings = SMALL._replace(steps=1)
    loss = train(Scheme("heavy", 1, heavy), 0, settings, data).loss
    assert 0 < loss < 2 * np.log(256)


def made(name: str, seed: int, choices: list[int], loss: float) -> Run:
    array = np.array([[choices]] * 3, np.int64)
    return Course(Scheme(name, 1, Gate), seed, array, array, loss).run(2)


def test_better_means_in_every_seed() -> None:
    none = [made("none, k=1", 0, [6, 2], 3.0), made("none, k=1", 1, [7, 1], 3.2)]
    good = [made("good", 0, [5, 3], 3.1), made("good", 1, [4, 4], 3.1)]
    half = [made("half", 0, [5, 3], 2.0), made("half", 1, [7, 1], 2.0)]
    of_none, of_good, of_half = summaries([*none, *good, *half])
    assert of_none.is_baseline and not of_none.is_better and of_none.loss_beside == 0
    assert of_good.is_better and of_good.num_better == 2
    assert of_good.measures["imbalance"] == (1.0, 1.125, 1.25)
    assert of_good.loss_beside == pytest.approx(0.0)
    assert not of_half.is_better and of_half.num_better == 1


def test_the_command_compares_with_none_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--json", str(tmp_path / "x.json"), "--svg", str(tmp_path / "x.svg")]
    words = ["balance", "--only", "switch", *WORDS, "--text", __file__, *where]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "none, k=1" in printed and "none, k=2" not in printed
    result = json.loads((tmp_path / "x.json").read_text())
    assert [summary["name"] for summary in result["summaries"]] == ["none, k=1", "switch"]
    runs = [Run.from_dict(run) for run in result["runs"]]
    assert len(runs) == 4
    assert [summary.as_dict() for summary in summaries(runs)] == result["summaries"]
    assert result["settings"]["last"] == 2  # no more than there are
    section = experts.balance_section(str(tmp_path / "x.json")).splitlines()
    assert [line.split(" | ")[0] for line in section[2:4]] == ["| none", "| switch"]
    assert section[3].endswith(" of 2 |") and section[2].endswith(" |  |")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(argparse.ArgumentTypeError, match="was not written by bench balance"):
        experts.balance_section(str(tmp_path / "x.json"))
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    assert len(root.findall("{*}rect")) == 1 + 2 * 2 * 4  # loads and choices of each expert


def test_a_picture_of_equal_loads_has_equal_bars() -> None:
    """And one of unequal loads has not."""
    for choices, number in (([4, 4], 1), ([6, 2], 2)):
        drawn = ElementTree.fromstring(picture([made("none, k=1", 0, choices, 1.0)], "a < b"))
        assert len({box.get("height") for box in drawn.findall("{*}rect")[1:]}) == number


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "fair"], "invalid choice: 'fair'"),
        (["--hidden", "6"], "4 heads do not divide a width of 6"),
        (["--text", "/dev/null"], "there is no text in /dev/null"),
        (["--context", "100000000"], "too short for a context"),
        (["--experts", "1"], "1 is less than 2"),
        (["--json", "/no/such/folder/x"], "cannot be written"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["balance", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_every_gate_is_among_the_schemes() -> None:
    """Every gate by its name has a run, and what it is compared with is one of them."""
    names = {scheme.name.partition(",")[0] for scheme in SCHEMES}
    assert names == {"none", *GATES}
    assert {baseline(scheme.k) for scheme in SCHEMES} <= {scheme.name for scheme in SCHEMES}
    assert [scheme.name for scheme in chosen(["bias"])] == ["none, k=2", "bias"]
