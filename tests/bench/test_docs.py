"""The generated documentation: written, found stale, and not touched without need."""

from __future__ import annotations

import pytest

from bench import docs
from bench.__main__ import main


def command(root, *options: str) -> int:
    return main(["docs", "--root", str(root), *options])


def test_the_repository_is_up_to_date():
    assert main(["docs", "--check"]) == 0


def test_stale_files_are_noticed_and_then_written(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{docs.BEGIN}\nold\n{docs.END}\nafter\n")
    assert command(tmp_path, "--check") == 1
    assert capsys.readouterr().err.count("is out of date; run python -m bench docs") == 2
    assert "old" in readme.read_text(), "--check writes nothing"
    assert command(tmp_path) == 0
    assert command(tmp_path, "--check") == 0
    assert readme.read_text().startswith(f"before\n{docs.BEGIN}\n| collective | algorithms |")
    assert readme.read_text().endswith(f"{docs.END}\nafter\n")


def test_one_changed_character_is_stale(tmp_path):
    assert command(tmp_path) == 0
    path = tmp_path / "docs" / "algorithms.md"
    path.write_text(path.read_text().replace("`p - 1`", "`p - 2`", 1))
    assert command(tmp_path, "--check") == 1


def test_a_readme_without_markers_is_left_alone(tmp_path):
    (tmp_path / "README.md").write_text("nothing to see\n")
    assert command(tmp_path) == 0
    assert (tmp_path / "README.md").read_text() == "nothing to see\n"


def test_a_missing_end_marker_is_refused():
    with pytest.raises(ValueError, match="is not followed by"):
        docs.with_section(docs.BEGIN, "text")
