"""A browser shows every page without errors, at the width of a desktop and of a phone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.site.building import pages
from tests.site.looking import SCHEMES, WINDOWS, problems, window
from tests.site.serving import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.site, pytest.mark.timeout(600)]

SCHEME = "document.body.getAttribute('data-md-color-scheme')"
FILTERS = "[...document.querySelectorAll('article img')].map(x => getComputedStyle(x).filter)"


@pytest.mark.parametrize("size", WINDOWS)
def test_every_page_is_shown_without_errors(
    size: str, browser: Browser, address: str, site: Path
) -> None:
    with window(browser, size) as page:
        assert problems(page, address, pages(site)) == []
        assert page.evaluate(SCHEME) == "slate", "the last look is at a dark page"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<script>console.error('wrong')</script>", "wrong"),
        ("<script>throw new Error('thrown')</script>", "thrown"),
        (
            "<img src='http://127.0.0.2:9/a.png'>",
            "request to another host: http://127.0.0.2:9/a.png",
        ),
        ("<img src='missing.svg'>", "no picture: "),
        ("<div style='width: 3000px'>wide</div>", "pixels too wide"),
    ],
)
@pytest.mark.parametrize("size", WINDOWS)
def test_what_is_wrong_with_a_page_is_noticed(
    size: str, body: str, message: str, browser: Browser, tmp_path: Path
) -> None:
    head = "<!doctype html><link rel='icon' href='data:,'>"
    (tmp_path / "good.html").write_text(f"{head}<p>good")
    (tmp_path / "bad.html").write_text(head + body)
    with served(tmp_path) as address, window(browser, size) as page:
        wrong = problems(page, address, ["good.html", "bad.html", "good.html"])
    assert any(message in text for text in wrong)
    assert all(text.startswith("bad.html: ") for text in wrong)


@pytest.mark.parametrize(
    ("words", "result"),
    [
        ("all_reduce", "a.md-search-result__link[href*='api/communicator']"),
        ("nosuchword", ".md-search-result__meta:text('No matching documents')"),
    ],
)
@pytest.mark.parametrize("size", WINDOWS)
def test_the_search_finds_a_call(
    size: str, words: str, result: str, browser: Browser, address: str
) -> None:
    with window(browser, size) as page:
        page.goto(address)
        if size == "phone":
            page.locator("label.md-header__button[for=__search]").click()
        page.locator("input.md-search__input").click()
        page.keyboard.type(words)
        page.locator(result).first.wait_for()


def test_colours_follow_the_system_and_a_switch(browser: Browser, address: str) -> None:
    for system, shown in zip(SCHEMES, ("default", "slate"), strict=True):
        with window(browser, "desktop", system) as page:
            page.goto(address)
            assert page.evaluate(SCHEME) == shown
            seen = []
            for title in ("Always light", "Always dark", "As the system"):
                page.locator(f"label[title='{title}']:visible").click()
                seen.append(page.evaluate(SCHEME))
            assert seen == ["default", "slate", shown]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pictures_are_dark_where_the_page_is(scheme: str, browser: Browser, address: str) -> None:
    with window(browser, "desktop", scheme) as page:
        page.goto(address + "algorithms/all_reduce.html")
        filters = page.evaluate(FILTERS)
    assert len(filters) > 10
    assert {text.startswith("invert") for text in filters} == {scheme == "dark"}
