"""What is wrong with a page that a browser shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

WINDOWS = {"desktop": (1440, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")

NAMES = {"light": "default", "dark": "slate"}  # of the schemes in Material for MkDocs
# Whether a page of the site has a scheme; other pages have none.
IS_SHOWN = """
    name => [null, name].includes(document.body.getAttribute('data-md-color-scheme'))
"""
TOO_WIDE = "document.scrollingElement.scrollWidth - window.innerWidth"
BROKEN_PICTURES = """
    [...document.images].filter(image => !image.complete || !image.naturalWidth)
        .map(image => image.src)
"""


@contextmanager
def window(browser: Browser, name: str, scheme: str = "light") -> Iterator[Page]:
    """Open a window of one of these sizes, on a system that is light or dark."""
    width, height = WINDOWS[name]
    size = {"width": width, "height": height}
    with closing(browser.new_context(viewport=size, color_scheme=scheme)) as context:
        yield context.new_page()


def problems(page: Page, address: str, names: list[str]) -> list[str]:
    """Open pages of a site one after the other, light and dark; return what is wrong with each."""
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if is_bad(message.type) else None)
    page.on("pageerror", lambda error: said.append(error.message))
    page.on("request", lambda request: said.extend(foreign(request.url, address)))
    page.on("requestfailed", lambda request: said.extend(unanswered(request)))
    wrong = []
    for name in names:
        page.goto(address + name, wait_until="load")
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            page.wait_for_function(IS_SHOWN, arg=NAMES[scheme])  # the page follows in its own time
            said += misshapen(page)
        wrong += [f"{name}: {text}" for text in dict.fromkeys(said)]
        said.clear()
    return wrong


def misshapen(page: Page) -> Iterator[str]:
    """What is wrong with how a page looks: pictures that are missing, and its width."""
    yield from (f"no picture: {source}" for source in page.evaluate(BROKEN_PICTURES))
    if (pixels := page.evaluate(TOO_WIDE)) > 0:
        yield f"{pixels} pixels too wide"


def is_bad(kind: str) -> bool:
    """Whether a message in the console is of a kind that should not be there."""
    return kind in ("error", "warning")


def unanswered(request: Request) -> Iterator[str]:
    """What is wrong with a request that failed, unless the browser has gone on to the next page."""
    if request.failure != "net::ERR_ABORTED":
        yield f"no answer: {request.url}"


def foreign(url: str, address: str) -> Iterator[str]:
    """What is wrong with a request: that it goes to another host."""
    if not url.startswith((address, "data:", "blob:")):
        yield f"request to another host: {url}"
