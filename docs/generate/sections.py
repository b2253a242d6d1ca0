"""Generated sections of hand-written documents, and Markdown tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def read(path: Path) -> str:
    """Return the text of a file, nothing if there is none."""
    return path.read_text() if path.exists() else ""


def has_section(text: str, name: str) -> bool:
    """Return whether a document has a section of this name."""
    return _markers(name)[0] in text


def with_section(text: str, name: str, section: str) -> str:
    """Return `text` with what is between the markers replaced; ValueError if the end is missing."""
    begin, end = _markers(name)
    marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not marked.search(text):
        raise ValueError(f"{begin} is not followed by {end}")
    return marked.sub(lambda _: f"{begin}\n{section}\n{end}", text)


def _markers(name: str) -> tuple[str, str]:
    """Return what stands before and after a section."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def table(words: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: columns of words, which begin left, then columns of numbers."""
    lines = [[*words, *numbers], ["---"] * len(words) + ["---:"] * len(numbers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
