"""Build a site from documents, and read what was built."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from subprocess import CompletedProcess

from tests.docs.pages import ROOT


def build(settings: Path, folder: Path) -> CompletedProcess[str]:
    """Run MkDocs as `make site` does, with these settings and into this folder."""
    command = [sys.executable, "-m", "mkdocs", "build"]
    return subprocess.run(
        [*command, "--config-file", str(settings), "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def small_site(root: Path, documents: Mapping[str, str]) -> Path:
    """Write documents into a folder, with the settings of the site; return the file of settings."""
    texts = dict.fromkeys(("README.md", "CONTRIBUTING.md", "CHANGELOG.md"), "# Title\n")
    for name, text in (texts | dict(documents)).items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    settings = root / "mkdocs.yml"
    settings.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\n"
        f"hooks: [{ROOT / 'docs' / 'site' / 'hooks.py'}]\n"
        "nav: [index.md, contributing.md, changelog.md, page.md]\n"
        "theme: {logo: null, favicon: null}\n"
    )
    return settings


def inventory(site: Path) -> set[str]:
    """The names that the API pages of a site describe, from its ``objects.inv``."""
    *_, compressed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split(" ")[0] for line in zlib.decompress(compressed).decode().splitlines()}


def pages(site: Path) -> list[str]:
    """The addresses of the pages of a site within it, without those that show sources."""
    names = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    return [name for name in names if not name.startswith(("source/", "404"))]


class Text(HTMLParser):
    """The text of a page outside of code."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("code", "pre", "script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        self.parts.append("" if self._inside else data)


# A list, a table, a link, emphasis, code, a directive or a heading that Markdown has not seen.
MARKUP = re.compile(r"^[-*] .*|^\|.*|\]\(|\]\[|\*\*\w[^*]*\*\*|`|^:::.*|^#+ .*", re.MULTILINE)


def raw_markup(page: str) -> Iterator[str]:
    """What stands in the text of a page as it was written, with what is around it."""
    text = "".join(Text(page).parts)
    for match in MARKUP.finditer(text):
        yield text[max(0, match.start() - 40) : match.end() + 40]
