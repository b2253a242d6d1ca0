"""The site is built without warnings, has every public name, and shows no raw markup."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from docs.generate import options
from tests.docs.public_names import everything
from tests.site.building import build, inventory, pages, raw_markup, small_site

pytestmark = [pytest.mark.site, pytest.mark.timeout(600)]

PUBLIC = [name for name, _ in everything()]


def not_on_a_page(names: Iterable[str], site: Path) -> list[str]:
    """The names that no API page describes."""
    return sorted(set(names) - inventory(site))


def test_every_public_name_is_on_an_api_page(site: Path) -> None:
    assert len(PUBLIC) > 500 and not_on_a_page(PUBLIC, site) == []


def test_a_name_that_is_on_no_page_is_noticed(site: Path) -> None:
    names = [*PUBLIC, "collectives.fly", "collectives.Communicator.all_fly"]
    assert not_on_a_page(names, site) == ["collectives.Communicator.all_fly", "collectives.fly"]


def test_the_page_of_commands_has_every_command(site: Path) -> None:
    page = (site / "commands.html").read_text()
    commands = re.findall(r"^## `(.+)`$", options.sections(), re.MULTILINE)
    assert commands and [name for name in commands if f"<code>{name}</code>" not in page] == []


def test_only_documents_are_copied(site: Path) -> None:
    endings = {path.suffix for path in site.rglob("*") if path.is_file()}
    assert endings <= {
        ".html",
        ".css",
        ".js",
        ".json",
        ".map",
        ".svg",
        ".png",
        ".xml",
        ".gz",
        ".inv",
    }


def test_pages_show_no_raw_markup(site: Path) -> None:
    raw = {name: list(raw_markup((site / name).read_text())) for name in pages(site)}
    assert len(raw) > 40 and {name: texts for name, texts in raw.items() if texts} == {}


@pytest.mark.parametrize(
    "text", ["- item", "| a | b |", "[a](b.md)", "**a**", "`a`", "::: a.b", "## a", "[`a`][b]"]
)
def test_raw_markup_is_noticed(text: str) -> None:
    assert [*raw_markup(f"<p>text\n{text}</p>")] and not [
        *raw_markup(f"<p><code>{text}</code></p>")
    ]


GOOD = """\
# Page

[here](#page) [there](index.md#title) [README](../README.md#title) [source](source.py)

- item
    - item in an item

::: collectives.world
"""


def test_a_small_site_is_built(tmp_path: Path) -> None:
    settings = small_site(tmp_path, {"docs/page.md": GOOD, "docs/source.py": "answer\n"})
    done = build(settings, tmp_path / "site")
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    page = (tmp_path / "site" / "page.html").read_text()
    assert 'href="index.html#title">README' in page and 'href="source/docs/source.py.html"' in page
    assert "answer" in (tmp_path / "site" / "source" / "docs" / "source.py.html").read_text()


MISTAKES = {
    "[a](other.md)": "a link 'other.md', but the target is not found",
    "[a](../missing.py)": "a link '../missing.py', but the target is not found",
    "[a](#missing)": "a link '#missing', but there is no such anchor",
    "[a](../README.md#missing)": "'index.md' does not contain an anchor '#missing'",
    "- item\n  - item in an item": "indent a list in a list by four spaces:   - item in an item",
}


def test_mistakes_in_documents_are_noticed(tmp_path: Path) -> None:
    page = "\n\n".join(["# Page", *MISTAKES])
    settings = small_site(tmp_path, {"docs/page.md": page, "docs/not_in_the_navigation.md": "# A"})
    done = build(settings, tmp_path / "site")
    messages = [*MISTAKES.values(), 'not included in the "nav" configuration']
    assert [text for text in messages if text not in done.stderr] == []
    assert "not_in_the_navigation.md" in done.stderr
    assert done.stderr.count("WARNING") == len(messages) and done.returncode != 0


def test_a_name_that_does_not_exist_is_noticed(tmp_path: Path) -> None:
    settings = small_site(tmp_path, {"docs/page.md": "# Page\n\n::: collectives.fly\n"})
    done = build(settings, tmp_path / "site")
    assert done.returncode != 0 and "collectives.fly could not be found" in done.stderr
