"""Two results: what changed beyond the noise is found, and nothing else."""

from __future__ import annotations

import copy
import json

import pytest

from bench.__main__ import main
from bench.results.files import KEYS

TIMES = {"low": 0.99, "seconds": 1.0, "high": 1.01, "fastest": 0.9, "mean": 1.0, "slowest": 1.0}
FORM = {
    **TIMES,
    "samples": 20,
    "algbw": 1.0,
    "busbw": 1.0,
    "portbw": None,
    "wrong": 0,
    "of_copy": None,
    "noise": 0.03,
}
SIZES = 8, 64


def a_result() -> dict:
    keys = {"collective": "all_reduce", "dtype": "float32", "op": "sum", "root": -1}
    rows = [
        {
            **keys,
            "size": size,
            "count": size,
            "name": name,
            "algorithm": None,
            "out_of_place": copy.deepcopy(FORM),
            "in_place": None,
        }
        for size in SIZES
        for name in ("ring", "native")
    ]
    return {"ranks": 2, "arrays": "numpy", "average": "greatest", "mpi": "MPI 1", "rows": rows}


def changed(slower: float, **form: float) -> dict:
    """The same, with one time that many times as long."""
    result = a_result()
    result["rows"][2]["out_of_place"].update(seconds=slower, **form)
    return result


@pytest.fixture
def compared(tmp_path, capsys):
    """The exit status and the output of a comparison with the result that has not changed."""

    def compare(after: dict, *options: str) -> tuple[int, str]:
        for name, result in (("a", a_result()), ("b", after)):
            (tmp_path / name).write_text(json.dumps(result))
        words = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--wide", *options]
        try:
            return main(words), capsys.readouterr().out
        except SystemExit as stop:
            return stop.code, capsys.readouterr().err

    return compare


def test_between_a_result_and_itself_nothing_changed(compared):
    status, said = compared(a_result(), "--fail-on-regression")
    assert (status, said) == (
        0,
        "0 of 4 times changed by more than the noise: 0 slower, 0 faster\n",
    )


def test_a_regression_is_printed_and_fails_only_if_asked(compared):
    status, said = compared(changed(1.3))
    assert status == 0 and "1 of 4 times changed by more than the noise: 1 slower, 0 faster" in said
    assert said.startswith("all_reduce, float32, sum, ring, ")
    (line,) = [line for line in said.splitlines() if line.startswith("| ring")]
    assert "64 B" in line and "+30.0%" in line and "3.0%" in line
    assert compared(changed(1.3), "--fail-on-regression")[0] == 1
    assert compared(changed(1.3), "--fail-on-regression", "25")[0] == 1
    assert compared(changed(1.3), "--fail-on-regression", "35")[0] == 0


def test_the_table_is_80_columns_wide(compared):
    _, said = compared(changed(1.3))
    assert max(map(len, said.splitlines())) <= 80


def test_what_is_faster_is_no_regression(compared):
    status, said = compared(changed(0.7), "--fail-on-regression")
    assert status == 0 and "0 slower, 1 faster" in said and "-30.0%" in said


@pytest.mark.parametrize("form", [{"noise": 0.4}, {"low": 0.8, "high": 1.7}])
def test_what_is_within_the_noise_is_no_change(compared, form):
    status, said = compared(changed(1.3, **form), "--fail-on-regression")
    assert status == 0 and said.startswith("0 of 4 times changed")


def test_results_of_other_ranks_or_of_nothing_in_common_are_refused(compared):
    status, said = compared(a_result() | {"ranks": 3})
    assert status == 2 and "has ranks 2" in said and "has ranks 3" in said
    other = a_result()
    for row in other["rows"]:
        row["size"] *= 3
    status, said = compared(other)
    assert status == 2 and "have measured nothing in common" in said


COMMANDS = [["compare", "{}", "{}"], ["plot", "{}", "--out", "x.svg"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_whose_names_control_the_terminal_is_refused(command, tmp_path, capsys):
    for place in ("name", "mpi"):
        result = a_result()
        (result["rows"][0] if place in KEYS else result)[place] = "\x1b[2J"
        (tmp_path / "odd").write_text(json.dumps(result))
        with pytest.raises(SystemExit) as stop:
            main([word.format(tmp_path / "odd") for word in command])
        assert stop.value.code == 2
        assert "'\\x1b[2J' cannot be printed" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{}", "no json", '{"rows": [{"size": 8}]}'])
@pytest.mark.parametrize("command", COMMANDS)
def test_files_of_other_commands_are_refused(command, text, tmp_path, capsys):
    (tmp_path / "odd").write_text(text)
    with pytest.raises(SystemExit) as stop:
        main([word.format(tmp_path / "odd") for word in command])
    assert stop.value.code == 2
    assert "was not written by python -m bench COLLECTIVE -J" in capsys.readouterr().err


def test_a_percentage_is_a_number(tmp_path, capsys):
    (tmp_path / "a").write_text(json.dumps(a_result()))
    with pytest.raises(SystemExit):
        main(["compare", *[str(tmp_path / "a")] * 2, "--fail-on-regression", "much"])
    assert "'much' is not a number of percent" in capsys.readouterr().err
