"""What MkDocs does for the site besides reading docs/ (https://www.mkdocs.org/user-guide/plugins).

README.md is the home page, and other documents at the root of the checkout are pages as well.  The
sources that documents link are pages that are not in the navigation.  The arguments of commands
come from their parsers.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.generate import options

AT_THE_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
OPTIONS = "<!-- options of commands -->"  # the place of the arguments in docs/commands.md

BLOCK_OF_CODE = re.compile(r"^( *)(`{3,}).*?^\1\2`*$", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"(?<=\]\()(?![a-z]+:)[^)\s#]+")
NESTED_ITEM = re.compile(r"^( +)(?:[-*+]|\d+\.) .*", re.MULTILINE)
SOURCE = """\
---
search:
  exclude: true
hide: [navigation, toc]
---

# {name}

``````{language}
{text}
``````
"""

log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents at the root of the checkout, and the sources that documents link."""
    root = Path(config.docs_dir).parent
    for name, page in AT_THE_ROOT.items():
        files.append(File.generated(config, page, abs_src_path=str(root / name)))
    linked_files = {path for file in files.documentation_pages() for path in linked(file, root)}
    for path in sorted(linked_files):
        page = page_of(path, root)
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, content=source(path, root)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the checkout lead to the pages of these files."""
    file, root = page.file, Path(config.docs_dir).parent
    if file.abs_src_path is None:  # a source
        return markdown
    if file.src_uri == "index.md":  # nothing stands beside it in the navigation
        page.meta["hide"] = ["navigation"]

    def to_page(target: re.Match[str]) -> str:
        path = file_at(file, target.group())
        if not is_of(path, root):
            return target.group()  # MkDocs says that it leads nowhere
        return posixpath.relpath(page_of(path, root), posixpath.dirname(file.src_uri))

    for item in wrongly_nested(markdown):
        log.warning("%s: indent a list in a list by four spaces: %s", file.src_uri, item)
    markdown = outside_of_code(markdown, lambda text: TARGET.sub(to_page, text))
    return markdown.replace(OPTIONS, options.sections())


def linked(file: File, root: Path) -> Iterator[Path]:
    """Return the files of the checkout that a document links."""
    targets = TARGET.findall(BLOCK_OF_CODE.sub("", file.content_string))
    return (path for target in targets if is_of(path := file_at(file, target), root))


def file_at(document: File, target: str) -> Path:
    """Return the file that the target of a link in a document names."""
    return (Path(document.abs_src_path or "").parent / target).resolve()


def is_of(path: Path, root: Path) -> bool:
    """Return whether there is this file in the checkout."""
    return path.is_file() and path.is_relative_to(root)


def page_of(path: Path, root: Path) -> str:
    """Return what MkDocs calls the page, or the picture, that shows a file of the checkout."""
    name = path.relative_to(root).as_posix()
    if name.startswith("docs/") and path.suffix != ".py":
        return name.removeprefix("docs/")
    return AT_THE_ROOT.get(name, f"source/{name}.md")


def source(path: Path, root: Path) -> str:
    """Return the document that shows a file of the checkout."""
    name = path.relative_to(root).as_posix()
    return SOURCE.format(name=name, language=path.suffix[1:], text=path.read_text())


def wrongly_nested(markdown: str) -> list[str]:
    """Return items of lists in lists that MkDocs, unlike GitHub, would take for another list's."""
    items = NESTED_ITEM.finditer(BLOCK_OF_CODE.sub("", markdown))
    return [match.group() for match in items if len(match.group(1)) % 4]


def outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    """Return a document whose text outside of blocks of code is changed."""
    parts, end = [], 0
    for block in BLOCK_OF_CODE.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block.group()]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])
