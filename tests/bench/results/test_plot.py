"""Pictures of results: every line has its label, and its own marker and dashes."""

from __future__ import annotations

import json
import sys
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread

from bench.__main__ import main
from bench.results import plot
from bench.results.files import result
from tests.bench.results.test_compare import FORM

NAMES = ["ring", "linear", "native", "memcpy", "bound"]


@pytest.fixture
def measured(tmp_path):
    keys = {"dtype": "float32", "op": "sum", "root": -1, "algorithm": None}
    rows = [
        {
            **keys,
            "collective": collective,
            "size": size,
            "count": size,
            "name": name,
            "out_of_place": FORM | {"seconds": 1e-6 * size},
            "in_place": FORM,
        }
        for collective in ("all_reduce", "scan")
        for size in (8, 64, 512)
        for name in NAMES
    ]
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"ranks": 2, "mpi": "Some MPI", "rows": rows}))
    return path


def test_an_svg_has_the_labels_as_text(measured, tmp_path):
    assert main(["plot", str(measured), "--out", str(tmp_path / "x.svg")]) == 0
    tree = ElementTree.parse(tmp_path / "x.svg")
    words = ["".join(node.itertext()) for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    for label in ("ring", "linear", "native", "memcpy", "lower bound"):
        assert words.count(label) == 2, label  # one for each collective
    assert "all_reduce on 2 ranks, float32, sum, Some MPI" in words
    assert words.count("bus bandwidth (GB/s)") == words.count("time (us)") == 2
    assert "64 B" in words


def test_a_png_is_a_picture(measured, tmp_path):
    assert main(["plot", str(measured), "--out", str(tmp_path / "x.png")]) == 0
    picture = imread(tmp_path / "x.png")
    high, wide = picture.shape[:2]
    assert wide > 1500 and high > 1000
    dark = (picture[..., :3].sum(axis=2) < 1.5).mean()
    assert 0.005 < dark < 0.2, "lines and text on white"


def test_lines_are_known_without_their_colors():
    names = [f"algorithm {number}" for number in range(20)]
    looks = [(style["marker"], str(style["linestyle"])) for style in plot.styles(names)]
    assert len(set(looks)) == 20
    assert all("marker" not in style for style in plot.styles(["memcpy", "bound"]))


def test_the_form_can_be_chosen(measured):
    read = result(str(measured))
    assert {key.form for key in plot.drawn(read, None)} == {"out_of_place"}
    assert {key.form for key in plot.drawn(read, "in_place")} == {"in_place"}
    grouped = plot.grouped(read, "in_place")
    assert [len(lines) for lines in grouped.values()] == [5, 5]
    assert [size for size, _ in grouped["scan on 2 ranks, float32, sum, Some MPI"]["ring"]] == [
        8,
        64,
        512,
    ]


def test_a_file_of_another_kind_is_refused(measured, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["plot", str(measured), "--out", str(tmp_path / "x.pdf")])
    assert "is neither a .svg nor a .png" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="2"):
        main(["plot", str(measured), "--out", str(tmp_path / "x.svg")])
    assert "pip install matplotlib" in capsys.readouterr().err
