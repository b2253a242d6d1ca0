"""A command: its options, what it does, and how it ends; and groups of commands."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import TypeAlias

Source: TypeAlias = "str | Callable[[], Command]"


EMPTY: dict[type[Exception], str] = {MemoryError: "there is not enough memory"}  # errors say none


class Refused(Exception):  # noqa: N818 - it is no error of the program
    """What the user asks for cannot be done; the message is a sentence that says why."""


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Return a context manager that raises Refused in place of OSError, ValueError and `kinds`."""
    refused: tuple[type[Exception], ...] = (OSError, ValueError, *kinds)
    try:
        yield
    except refused as error:
        raise Refused(str(error) or EMPTY.get(type(error), type(error).__name__)) from error


@dataclass(frozen=True)
class Command:
    """A command of one of the packages.

    Parameters
    ----------
    module : str
        The module that ``python -m`` runs, such as ``"parallel.memory"``.
    description : str or None
        The text of its help: the docstring of the module, whose first line says what it does.
    add_options : function
        Called with an ArgumentParser, to which it adds the options.
    run : function
        Called with the options that were read; returns the exit status.  It raises Refused for what
        cannot be done.
    read : function, optional
        Called with the parser and the words; returns the options, where argparse alone does not
        understand the words.
    """

    module: str
    description: str | None
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    read: Callable[[argparse.ArgumentParser, Sequence[str]], argparse.Namespace] | None = None

    def parser(self, prog: str | None = None) -> argparse.ArgumentParser:
        """Return the parser; `prog` is the name in its texts, ``python -m MODULE`` by default."""
        parse = argparse.ArgumentParser(
            prog or f"python -m {self.module}",
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_options(parse)
        return parse

    def main(self, words: Sequence[str] | None = None, prog: str | None = None) -> int:
        """Run the command line `words`, by default of this process; return the exit status."""
        parse = self.parser(prog)
        words = sys.argv[1:] if words is None else words
        options = self.read(parse, words) if self.read else parse.parse_args(words)
        try:
            return self.run(options)
        except Refused as refusal:
            parse.exit(2, f"{parse.prog}: {refusal}\n")


class GroupParser(argparse.ArgumentParser):
    """A parser that reads what commands do, from their files, only when it prints its help."""

    lines: Callable[[], Iterator[str]]

    def format_help(self) -> str:
        """Return the help, with the list of commands."""
        self.epilog = "\n".join(self.lines())
        return super().format_help()


@dataclass(frozen=True)
class Group:
    """Commands by name.  Only the module of the command that is run is imported.

    Parameters
    ----------
    module : str
        The module that ``python -m`` runs, such as ``"bench"``.
    description : str or None
        The text of the help, above the lists of commands.
    sections : mapping of str to (mapping of str to (str or function))
        By title, for each name, of one word or two, the module whose ``COMMAND`` it is, or a
        function that returns the `Command`.
    add_options : function, optional
        Called with a parser and this group; it adds the options that stand before a command.
    """

    module: str
    description: str | None
    sections: Mapping[str, Mapping[str, Source]]
    add_options: Callable[[argparse.ArgumentParser, Group], None] | None = None

    @property
    def commands(self) -> dict[str, Source]:
        """The commands of all sections."""
        return {name: source for part in self.sections.values() for name, source in part.items()}

    def main(self, words: Sequence[str] | None = None, prog: str | None = None) -> int:
        """Run the command line `words`, by default of this process; return the exit status."""
        parse = self.parser(prog)
        options = parse.parse_args(sys.argv[1:] if words is None else words)
        if not options.words:
            parse.print_help()
            return 0
        if (name := self.name_in(options.words)) is None:
            parse.error(self.unknown(options.words[0], parse.prog))
        rest = options.words[len(name.split()) :]
        return self.command(name).main(rest, f"{parse.prog} {name}")

    def unknown(self, word: str, prog: str) -> str:
        """Return why `word` alone is no command."""
        after = [name.split()[1] for name in self.commands if name.startswith(f"{word} ")]
        if after:
            return f"{word} is followed by {', '.join(after)}"
        return f"there is no command {word!r}; {prog} --help lists all"

    def name_in(self, words: Sequence[str]) -> str | None:
        """Return the name of the command with which some words begin; None if there is none."""
        two_words, one_word = " ".join(words[:2]), " ".join(words[:1])
        return next((name for name in (two_words, one_word) if name in self.commands), None)

    def parser(self, prog: str | None = None) -> argparse.ArgumentParser:
        """Return the parser of what stands before the arguments of a command."""
        prog = prog or f"python -m {self.module}"
        parse = GroupParser(
            prog,
            usage=f"{prog} COMMAND ...",
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parse.lines = self.lines
        if self.add_options is not None:
            self.add_options(parse, self)
        parse.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        return parse

    def command(self, name: str) -> Command | Group:
        """Return the command of this name; its module is imported."""
        source = self.commands[name]
        if not isinstance(source, str):
            return source()
        is_package = file_of(source).name == "__main__.py"
        module = import_module(f"{source}.__main__" if is_package else source)
        command: Command | Group = module.COMMAND
        return command

    def lines(self) -> Iterator[str]:
        """Yield a line for each command, below the title of its section."""
        width = max(map(len, self.commands)) + 2
        for number, (title, commands) in enumerate(self.sections.items()):
            if number:
                yield ""
            yield f"{title}:"
            for name, source in commands.items():
                text = summary(source) if isinstance(source, str) else first_line(source())
                head, room = f"  {name:{width}}", get_terminal_size().columns
                yield from wrap(head + text, room, subsequent_indent=" " * len(head))


def summary(module: str) -> str:
    """Return the first sentence of a module's docstring; neither it nor its package is imported."""
    return sentence(ast.get_docstring(ast.parse(file_of(module).read_text())))


def file_of(module: str) -> Path:
    """Return the file of a module, and that of its ``__main__`` if it is a package."""
    package, *names = module.split(".")
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed"
    path = Path(spec.submodule_search_locations[0], *names)
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def first_line(command: Command | Group) -> str:
    """Return the first sentence of a command's description."""
    return sentence(command.description)


def sentence(text: str | None) -> str:
    """Return the first line of a docstring, without a full stop."""
    return (text or "").partition("\n")[0].rstrip(".")
