"""The commands of the pages end with status 0, and pages and parsers have the same options.

Most commands take long.  `make test ARGS="-m pages"` runs them all, each at its own size; without
-m only the quickest are run (`QUICK`).  `python -m tests.docs.pages` prints the seconds of each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from collectives import algorithms
from collectives.__main__ import COMMAND as RING
from collectives.console import Group
from collectives.launch.command import split_words as split_launch
from docs.generate.options import CHECKOUT, arguments, commands, parsers, sections
from tests.docs import pages
from tests.docs.pages import NAMES, NOT_RUN, PAGES, Command, Outcome

# What a user types to run a module.
MODULES = {str(module): f"ring {name}" for name, module in RING.commands.items()}
MODULES |= {module: f"python -m {module}" for module in CHECKOUT}
# Commands that take seconds.
QUICK = {
    *("ring export", "ring export step", "ring memory", "ring moe plan", "ring pipeline"),
    "ring show",
}
# Options of mpirun and srun that pages name.
FOREIGN = {"--allow-run-as-root", "--bind-to", "-iface", "--mca", "--mpi", "--oversubscribe"}
# What pages mean that name options of it without the command.
MEANT = {
    "CONTRIBUTING.md": ["ring train"],
    "limits.md": ["ring moe train"],
    "choosing.md": ["ring simulate"],
}


def programs(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands that a line runs, such as that of a launcher's job, and their arguments."""
    words = shlex.split(text, comments=True)
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        if word == "-m" and rest and rest[0] in MODULES:
            name, rest = typed(*MODULES[rest[0]].split(" ", 1), rest[1:])
        elif word == "ring":
            name, rest = typed("ring", "", rest)
        else:
            continue
        if name in commands():
            yield name, split_launch(rest)[0] if name == "ring launch" else rest


def typed(prog: str, name: str, words: list[str]) -> tuple[str, list[str]]:
    """The command with which words begin, perhaps behind options of its group; and the others."""
    name = f"{prog} {name}".strip()
    group = RING if name == "ring" else commands()[name]
    if not isinstance(group, Group):
        return name, words
    while words and words[0].startswith("-"):
        words = words[2 if words[0] == "--import" else 1 :]
    words = ["all" if word == "COLLECTIVE" else word for word in words]
    if (inner := group.name_in(words)) is None:
        return name, words
    return typed(name, inner, words[len(inner.split()) :])


# Running


def parameters() -> Iterator[object]:
    """The commands that are run, each once; those that are not quick are marked."""
    for group in pages.groups(PAGES):
        names = {name for command in group for name, _ in programs(command.text)}
        marks = () if names and names <= QUICK else (pytest.mark.pages,)
        yield pytest.param(group, marks=marks, id=f"{group[0].page}:{group[0].text}")


def failed(outcomes: Iterator[Outcome]) -> list[str]:
    """What is wrong with commands: their status and the end of their output."""
    return [
        f"{x.command.text}: status {x.status} after {x.seconds:.0f} s\n{x.output[-2000:]}"
        for x in outcomes
        if x.status != 0
    ]


@pytest.mark.timeout(0)  # each command has its own
@pytest.mark.parametrize("group", [*parameters()])
@pytest.mark.slow
def test_a_command_ends_with_status_0(group: list[Command], tmp_path: Path) -> None:
    assert failed(pages.run(group, tmp_path)) == []


def test_a_command_that_fails_is_noticed(tmp_path: Path) -> None:
    """Also one that takes too long; those behind it in its block are not run."""
    page = tmp_path / "page.md"
    page.write_text("```sh\npython -c 'exit(3)'   # a comment\ntouch never\n```\n")
    (group,) = pages.commands(page)
    (said,) = failed(pages.run(group, tmp_path))
    assert said.startswith("python -c 'exit(3)': status 3")
    assert not (tmp_path / "never").exists()


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    group = [Command("page.md", 1, "sleep 100 | cat")]
    (said,) = failed(pages.run(group, tmp_path, seconds=0.2))
    assert said.startswith("sleep 100 | cat: status None")


def test_what_is_not_run_is_on_a_page_and_has_a_reason() -> None:
    texts = {command.text for path in PAGES for group in pages.commands(path) for command in group}
    assert {*NOT_RUN, *NAMES} - texts == set()
    assert set(NOT_RUN.values()) == set(pages.REASONS)


def test_commands_in_the_text_of_pages_are_complete_or_listed_as_names() -> None:
    inline = {
        command.text
        for path in PAGES
        for group in pages.commands(path)
        for command in group
        if not command.in_block and path.name not in pages.ONLY_NAMES
    }
    incomplete = {text for text in inline if not is_complete(text)}
    assert incomplete == NAMES


def is_complete(text: str) -> bool:
    """Whether parsers accept a command, without a look at its values."""
    return all(accepts(name, words) for name, words in programs(text))


# Options


def accepts(name: str, words: Sequence[str]) -> bool:
    """Whether the parser of a command takes these words."""
    if isinstance(commands()[name], Group):
        return False
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            commands()[name].parser().parse_args(words)
        except SystemExit as end:
            return end.code == 0
    return True


def parsers_of(name: str, words: Sequence[str]) -> list[argparse.ArgumentParser]:
    """The parser of a command, and that of the command in it which the words name."""
    named = name, " ".join([name, *words[:1]])
    return [parsers()[key] for key in named if key in parsers()]


def options_of(parsers: Sequence[argparse.ArgumentParser]) -> dict[str, list[argparse.Action]]:
    """The options of some parsers by their names; --help is one of them."""
    options: dict[str, list[argparse.Action]] = {}
    for parse in parsers:
        for action in parse._actions:
            for name in action.option_strings:
                options.setdefault(name, []).append(action)
    return options


def wrong_options(
    words: Sequence[str], parsers: Sequence[argparse.ArgumentParser]
) -> Iterator[str]:
    """The options among some words that no parser has, or not with this value."""
    known, rest = options_of(parsers), list(words)
    while rest:
        option, _, value = rest.pop(0).partition("=")
        if not re.match(r"--?[A-Za-z]", option):
            continue
        actions = known.get(option, [])
        takes_value = any(action.nargs != 0 for action in actions)
        if takes_value and not value and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        elif takes_value and not value and rest and " " in rest[0]:
            value = rest.pop(0)  # such as "--mca a b" of --mpi-args
        if not actions:
            yield option
        elif value and not any(allows(action, value) for action in actions):
            yield f"{option} {value}"


def allows(action: argparse.Action, value: str) -> bool:
    """Whether an option takes a value: each of several between "|"; a word in capitals is any."""
    choices = {str(choice) for choice in action.choices or ()}
    return not choices or all(word in choices or word.isupper() for word in value.split("|"))


def wrong_in_commands(path: Path) -> Iterator[str]:
    """The options in the commands of a page that these do not have."""
    for group in pages.commands(path):
        for command in group:
            yield from (f"line {command.line}: {option}" for option in wrong_in(command.text))


def wrong_in(text: str) -> Iterator[str]:
    """The options in a command that its programs do not have."""
    for name, words in programs(text):
        for option in wrong_options(words, parsers_of(name, words)):
            yield f"{name} has no {option}"


def wrong_in_text(path: Path) -> Iterator[str]:
    """The options in the text of a page that none of the commands that it names has."""
    text = path.read_text().replace("\\|", "|")  # in tables
    named = [(name, "") for name in MEANT.get(path.name, ())]
    for words in re.findall(r"(?:\bring|-m [\w.]+)(?: \w+){0,3}", text):
        named += [(name, (rest or [""])[0]) for name, rest in programs(words)]
    parsers = [parse for name, word in named for parse in parsers_of(name, [word])]
    for span in re.findall(r"`(--?[A-Za-z][^`]*)`", pages.outside_of_blocks(text)):
        for option in wrong_options(span.split(), parsers):
            if option.split()[0] not in FOREIGN:
                yield f"no command of the page has {option}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_options_that_a_page_names_exist(path: Path) -> None:
    assert [*wrong_in_commands(path), *wrong_in_text(path)] == []


def test_options_that_do_not_exist_are_noticed(tmp_path: Path) -> None:
    """In a command, behind a launcher, and in the text; also values that are not among choices."""
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\n"
        "python -m collectives.launch -n 2 --fast -m parallel.train \\\n"
        "    --zero 4 --lr 1\n"
        "```\n"
        "`python -m bench tune --native` has `--dtype float32|int8`, `--zero STAGE`,\n"
        "`--layers 2`, `--sequence-parallel --shared` and `--nothing`.\n"
    )
    assert [*wrong_in_commands(page)] == [
        "line 2: ring launch has no --fast",
        "line 2: ring train has no --zero 4",
        "line 5: ring bench tune has no --native",
    ]
    assert [*wrong_in_text(page)] == [
        "no command of the page has --dtype float32|int8",
        "no command of the page has --nothing",
    ]


@pytest.mark.parametrize("name", commands())
def test_options_in_the_help_of_a_command_exist(name: str) -> None:
    """In the examples of its description, and in the list of programs of a checkout."""
    module = name.removeprefix("python -m ")
    examples = [f"{name} {CHECKOUT[module]}"] if module in CHECKOUT else []
    on_one_line = re.sub(r"\\+\n\s*", "", commands()[name].description or "")
    examples += re.findall(r"^ *((?:ring|.*python -m) .*)", on_one_line, re.MULTILINE)
    assert [wrong for text in examples for wrong in wrong_in(text)] == []


def test_an_option_in_a_help_that_does_not_exist_is_noticed() -> None:
    assert [*wrong_in("ring launch -n 2 -m moe.train --fast")] == ["ring moe train has no --fast"]
    assert [*wrong_in("ring simulate step --fast")] == ["ring simulate step has no --fast"]
    assert [*wrong_in("ring bench --import m all --fast")] == ["ring bench all has no --fast"]


@cache
def listed() -> dict[str, str]:
    """The sections of the page of commands by the commands in their headings."""
    _, *texts = f"\n{sections()}".split("\n## `")
    return {text.partition("`")[0]: text for text in texts}


def missing_on_the_page(name: str, parse: argparse.ArgumentParser) -> list[str]:
    """The arguments of a command that the page of commands does not have."""
    collectives = {f"ring bench {name}" for name in (*algorithms.collectives(), "all")}
    section = listed()["ring bench COLLECTIVE" if name in collectives else name]
    named = (x.option_strings or [x.metavar or x.dest] for x in arguments(parse))
    names = [name for spellings in named for name in spellings]
    return [name for name in names if not re.search(rf"[`\s]{re.escape(name)}[`\s,]", section)]


@pytest.mark.parametrize("name", parsers())
def test_every_option_of_a_command_is_on_a_page(name: str) -> None:
    assert missing_on_the_page(name, parsers()[name]) == []


def test_an_option_that_is_on_no_page_is_noticed() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("--steps")
    parse.add_argument("--step")
    assert missing_on_the_page("ring train", parse) == ["--step"]
