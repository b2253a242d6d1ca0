"""The operators of reductions: what combines two arrays, and for which dtypes that makes sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from collectives.arrays.backends import Array, Backend, BinaryFunction, backend_of
from collectives.arrays.kernels import kind
from collectives.schedule import SPECS

_INTEGERS, _FLOATS, _COMPLEX, _BOOL = "iu", "f", "c", "b"


@dataclass(frozen=True)
class Operator:
    """What combines two arrays in a reduction.  `from_function` makes one of your own.

    An operator must be associative.  Every combination of two arrays is rounded to their dtype.
    Floats of two bytes are combined, and an average of them is divided, in float32; what is sent
    and kept has two bytes.  An average is a sum that is divided at the end, so that averages of
    whole numbers are exact where they can be; one of float16 is infinite if a partial sum exceeds
    65,504.  Then divide the input by the number of ranks, and sum: small values lose bits that way.

    Attributes
    ----------
    name : str
        What errors call it.
    function : str or function
        The name of a NumPy function, or a function that is called in the same way.
    kinds : str, optional
        The kinds of dtypes that it serves; None: all.
    is_average : bool
        Whether the result is divided by the number of ranks.
    is_commutative : bool
        Whether arrays may be combined in another order than that of the ranks.
    """

    name: str
    function: str | BinaryFunction
    kinds: str | None = None
    is_average: bool = False
    is_commutative: bool = True

    @classmethod
    def from_function(
        cls,
        function: Callable[[Array, Array], Array],
        *,
        commutative: bool = False,
        name: str | None = None,
    ) -> Operator:
        """Make an operator of a function that combines two arrays element by element.

        Parameters
        ----------
        function : function
            Called as ``function(left, right)`` with two 1-d arrays of the input's kind (NumPy or
            CuPy) and dtype; `left` comes from lower ranks than `right`.  It returns an array of the
            same shape and dtype.  The two are read-only (CuPy has no such arrays; there they are
            copies), and may be any part of the input.  The function must be associative.  Every
            call tries it on the first element before anything is sent.
        commutative : bool
            Whether the order does not matter.  If False, only algorithms that keep the order of the
            ranks are used.
        name : str, optional
            What errors call it; by default, the function's name.

        Raises
        ------
        TypeError
            If `function` cannot be called.

        Examples
        --------
        >>> import collectives
        >>> import numpy as np
        >>> def larger(a, b):
        ...     return np.where(abs(a) < abs(b), b, a)
        >>> largest = collectives.Operator.from_function(larger)
        >>> def reduced(comm):
        ...     return comm.all_reduce(np.array([-comm.rank]), op=largest)
        >>> collectives.run(reduced, size=3)[0]
        array([-2])
        """
        if not callable(function):
            raise TypeError(f"an operator needs a function of two arrays, not {function!r}")
        label = str(getattr(function, "__name__", function) if name is None else name)
        return cls(label, _into_out(function, label), is_commutative=bool(commutative))

    def check(self, dtype: np.dtype[Any]) -> None:
        """Raise TypeError if the operator has no meaning for this dtype."""
        if self.kinds is not None and kind(dtype) not in self.kinds:
            hint = ""
            if kind(dtype) == _BOOL:
                hint = "; bool takes and, or, xor, min, max"
            raise TypeError(f"op {self.name!r} is not defined for dtype {dtype}{hint}")

    def rehearse(self, backend: Backend, x: Array) -> None:
        """Let a caller's function combine the first element of `x` with itself, on `backend`.

        So a function that cannot serve fails on all ranks before anything is sent, and not half-way
        on those that combine.
        """
        if isinstance(self.function, str) or x.size == 0:
            return
        first, result = (backend.empty((1,), x.dtype) for _ in range(2))
        backend.copy(x.reshape(-1)[:1], first)
        with np.errstate(all="ignore"):
            backend.binary(self.function, x.dtype)(first, first, result)


def _into_out(function: Callable[[Array, Array], Array], name: str) -> BinaryFunction:
    """Return a function that checks the result of a caller's function and copies it to `out`."""

    def combine(left: Array, right: Array, out: Array, /) -> None:
        try:
            result = function(left, right)
        except ValueError as error:
            if "read-only" in str(error):  # NumPy has no exception of its own for it
                raise ValueError(f"op {name!r} must not change its operands: {error}") from error
            raise
        given, wanted = (_kind_dtype_shape(x, f"what op {name!r} returns") for x in (result, left))
        if given != wanted:
            form = "{} {} of shape {}".format
            raise TypeError(f"op {name!r} returns {form(*given)} for two {form(*wanted)}")
        out[...] = result

    return combine


def _kind_dtype_shape(x: Array, what: str) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    """Return the kind, dtype and shape of an array.

    Raises TypeError for what is none.
    """
    return backend_of(x, what).name, x.dtype, tuple(x.shape)


def has_infinities(dtype: np.dtype[Any]) -> bool:
    """Return whether the dtype has values that are not finite."""
    return kind(dtype) in _FLOATS + _COMPLEX


# All of these are commutative.
_NUMBERS = _INTEGERS + _FLOATS + _COMPLEX
OPERATORS = {
    op.name: op
    for op in (
        Operator("sum", "add", _NUMBERS),
        Operator("prod", "multiply", _NUMBERS),
        Operator("min", "minimum", _BOOL + _INTEGERS + _FLOATS),
        Operator("max", "maximum", _BOOL + _INTEGERS + _FLOATS),
        Operator("avg", "add", _FLOATS + _COMPLEX, is_average=True),
        Operator("and", "bitwise_and", _BOOL + _INTEGERS),
        Operator("or", "bitwise_or", _BOOL + _INTEGERS),
        Operator("xor", "bitwise_xor", _BOOL + _INTEGERS),
    )
}


@cache
def operators(collective: str) -> tuple[str, ...]:
    """Return the named operators that a collective takes.

    For prefixes an average has no meaning.
    """
    is_prefix = SPECS[collective].takes is not None
    return tuple(name for name, op in OPERATORS.items() if not (is_prefix and op.is_average))


def operator(op: object, collective: str) -> Operator:
    """Return the operator of this name, or the caller's own.

    Raises ValueError for anything else.
    """
    if isinstance(op, Operator):
        return op
    known = operators(collective)
    if isinstance(op, str) and op in known:
        return OPERATORS[op]
    if isinstance(op, str) and op in OPERATORS:
        raise ValueError(f"op {op!r} has no meaning for {collective}; it takes {', '.join(known)}")
    raise ValueError(
        f"unknown op {op!r}; known: {', '.join(known)}, "
        "and what collectives.Operator.from_function makes"
    )
