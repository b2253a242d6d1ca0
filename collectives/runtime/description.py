"""Describes a call for the comparison of checked mode, as far as one rank knows it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache

from collectives.arrays import OPERATORS, Array, Arrays, Operator, num_elements
from collectives.programs import CallSpec, CountOfEachBlock, Counts, OwnCounts
from collectives.runtime.fingerprint import Fingerprint
from collectives.runtime.prepared import Prepared
from collectives.schedule import SPECS

# The folders of files whose frames are not those of a caller.
_libraries: tuple[str, ...] = (os.path.dirname(os.path.dirname(__file__)) + os.sep,)
_PLACE_NOT_COMPARED = ("exscan", "barrier")  # not every rank has both arrays


class Compared:
    """A call that the ranks compare before a run.

    Attributes
    ----------
    check : int
        The number of the comparison.
    fields : mapping
        Fields of its fingerprint that do not follow from the spec.
    has_number : bool
        Whether the call already counts, as calls on devices do.
    """

    has_number = False

    def __init__(
        self, spec: CallSpec, arrays: Arrays, run: Prepared, check: int, fields: Mapping[str, str]
    ) -> None:
        self.spec, self.arrays, self.fields, self.check = spec, arrays, fields, check
        self.name, self.title, self.number = run.name, run.title, run.number
        self.scratch_bytes, self.is_header = run.scratch_bytes, run.is_ahead
        self.place = "" if spec.blocking == "yes" else line_of_caller()

    def fingerprint(self, compares_place: bool) -> Fingerprint:
        """Return the fingerprint of the call, without values."""
        source, target = self.arrays.source, self.arrays.target
        has_both = source is not None and target is not None and bool(source.size and target.size)
        own = describe(self.spec, has_both)._replace(
            call=self.name.removesuffix("a"), **self.fields
        )
        return own if compares_place else own._replace(in_place="")


@lru_cache(maxsize=1024)
def describe(spec: CallSpec, has_both: bool) -> Fingerprint:
    """Return the fields that all ranks must agree on, as far as this rank knows them.

    `has_both` says whether this rank has an input and an output that are not empty.
    """
    kind, shape = SPECS[spec.collective], spec.shape
    layout = "" if shape is None else str(shape)
    if shape is not None and not kind.has_pieces:  # these join or divide rows
        layout = f"({', '.join(['*', *map(str, shape[1:])])})"
    is_whole = kind.has_pieces or shape is None
    return Fingerprint(
        spec.label or spec.collective,
        dtype="" if shape is None else str(spec.dtype),
        counts="" if is_whole else _rows(spec.counts, num_elements((shape or ())[1:])),
        op="" if spec.op is None else _operator(spec.op),
        root=str(spec.root) if kind.is_rooted else "",
        algorithm=_algorithm(spec),
        in_place="" if kind.is_rooted else _in_place(spec, has_both),
        layout=layout,
        out=spec.out,
        blocking=spec.blocking,
    )


def _rows(counts: Counts | None, per_row: int) -> str:
    """Return counts of elements as text, in rows."""
    if counts is None or isinstance(counts, int | OwnCounts | CountOfEachBlock) or not per_row:
        return ""
    if not isinstance(counts[0], int):
        return str([[count // per_row for count in row] for row in counts])
    rows = [count // per_row for count in counts]
    return f"{rows[0]} each" if len(set(rows)) == 1 else str(rows)


def _operator(op: Operator) -> str:
    if OPERATORS.get(op.name) is op:
        return op.name
    return f"{op.name}, user-defined, {'' if op.is_commutative else 'not '}commutative"


def _algorithm(spec: CallSpec) -> str:
    options = ", ".join(f"{name}={value}" for name, value in spec.options)
    return f"{spec.algorithm.name}({options})" if options else spec.algorithm.name


def fields_with_header(
    collective: str, like: Array | None, counts: Sequence[int] | None
) -> dict[str, str]:
    """Return the fields that are compared before a header is sent.

    `like` and `counts` are what this rank knows of the root's array and of its rows, if anything.
    """
    layout = "" if like is None else str(tuple(like.shape))
    if like is not None and not SPECS[collective].has_pieces:
        layout = f"({', '.join(['*', *map(str, like.shape[1:])])})"
    return {
        "collective": collective,
        "dtype": "" if like is None else str(like.dtype),
        "counts": "" if counts is None else _rows(tuple(counts), 1),
        "algorithm": "",
        "layout": layout,
        "out": "not given",
    }


def _in_place(spec: CallSpec, has_both: bool) -> str:
    """Return whether the call is in place, as text; nothing if that cannot be compared."""
    if spec.collective in _PLACE_NOT_COMPARED or not has_both:
        return ""
    return "no" if spec.aliasing == "none" else "yes"


def add_library(path: str) -> None:
    """Let functions that call the ones in a file or folder count as callers.

    The functions in the file or folder do not.
    """
    global _libraries
    _libraries = (*_libraries, path if path.endswith(".py") else path + os.sep)


def place_of_caller() -> tuple[str, int]:
    """Return the path and the line of the caller: the innermost frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_libraries):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def line_of_caller() -> str:
    """Return the file, without its folder, and the line of the caller."""
    path, line = place_of_caller()
    return f"{os.path.basename(path)}:{line}"
