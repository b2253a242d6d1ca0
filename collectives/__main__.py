"""List the commands of this package: ``python -m collectives``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import collectives

# A command and an example of its arguments.
COMMANDS = {
    "collectives.launch": "-n 4 script.py",
    "collectives.flight": "DIRECTORY",
    "collectives.warm": "",
    "collectives.doctor": "",
    "collectives.simulate": "all_reduce --bytes 256M --topology hosts:16x8",
    "collectives.export": "all_reduce ring --ranks 64 --bytes 1M --format goal",
    "parallel.train": "--strategy zero2",
    "parallel.memory": "--params 7.5e9 --ranks 64",
    "parallel.pipeline": "compare --stages 4 --micro-batches 8",
    "parallel.plan": "--layers 32 --hidden 4096 --heads 32 --hosts 8x8",
    "parallel.simulate": "--mesh pipe=2,data=2,tensor=2 --layers 4 --hidden 512 --heads 8 "
    "--topology hosts:1x8",
    "parallel.show": "zero3 --ranks 4 --micro-batches 2",
    "parallel.export": "--ranks 8 --mesh data=2,pipe=2,tensor=2 --format goal",
    "moe.train": "--mesh data=2,expert=2 --moe switch",
    "moe.plan": "--mesh data=2,expert=4 --hosts 2",
    "moe.generate": "--mesh expert=2,tensor=2 --moe switch --checkpoint FOLDER",
    "bench": "all_reduce -b 8 -e 64M --native",
}


def about(module: str) -> str:
    """The first sentence of a module's docstring, read without importing the module."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is not installed"
    origin = Path(spec.origin)
    main = origin.parent / "__main__.py"
    path = main if origin.name == "__init__.py" and main.exists() else origin
    first, *_ = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    return first.partition(": ``")[0].rstrip(".")


def lines() -> Iterator[str]:
    """What there is to run, one command after the other."""
    yield f"ring-collectives {collectives.__version__}: commands, each of which explains --help"
    for module, arguments in COMMANDS.items():
        yield ""
        yield f"  {about(module)}:"
        yield f"    python -m {module} {arguments}".rstrip()
    yield ""
    yield "Under MPI: python -m collectives.launch -n 4 -m MODULE ARGUMENTS"


def main() -> int:
    """Print the list."""
    sys.stdout.writelines(f"{line}\n" for line in lines())
    return 0


if __name__ == "__main__":
    sys.exit(main())
