"""The pages of architecture are true: each function that they link to is where the link says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
LINK = re.compile(r"\[`([\w.]+)`\]\(([^)]+\.py)\)")


def defined(path: Path) -> set[str]:
    """The names that a file defines: "function", "Class", "Class.method", "CONSTANT"."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.ClassDef):
            methods = (member for member in node.body if isinstance(member, ast.FunctionDef))
            names.update(f"{node.name}.{method.name}" for method in methods)
    return names


def stale(text: str, folder: Path) -> Iterator[str]:
    """The links that lead to nothing."""
    for name, target in LINK.findall(text):
        path = folder / target
        if not path.exists() or name not in defined(path):
            yield f"{name} in {target}"


@pytest.mark.parametrize("page", ["architecture.md", "architecture_training.md"])
def test_every_function_is_where_the_link_says(page: str) -> None:
    text = (DOCS / page).read_text()
    assert len(LINK.findall(text)) > 25
    assert list(stale(text, DOCS)) == []


def test_a_stale_link_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def here(): ...\nclass There:\n    def inside(self): ...\n")
    text = "[`here`](a.py) [`There.inside`](a.py) [`gone`](a.py) [`here`](b.py)"
    assert list(stale(text, tmp_path)) == ["gone in a.py", "here in b.py"]
