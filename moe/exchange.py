"""Send the rows of tokens to experts, let these compute, and add what comes back to the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import collectives
from collectives import Communicator
from moe import dispatch
from moe.dispatch import Part
from moe.routing import Values
from parallel.nn import Array, Step, namespace_of, on_host
from parallel.nn.functional import upcast

Forward: TypeAlias = Callable[[Array, Part], tuple[Array, Any]]
"""Called with the received rows of a part; returns what experts make of them and what they keep."""
Backward: TypeAlias = Callable[[Array, Part, Any], tuple[Array, Any]]
"""Called with the derivatives by these rows and what was kept; returns those by the received rows,
and what the experts' weights need."""


class Sent(NamedTuple):
    """What `Exchange.forward` keeps: by part, what experts computed and what they keep."""

    parts: list[Part]
    returned: list[Array]  # in the places of each part; nothing without weights
    kept: list[Any]


class Exchange(NamedTuple):
    """The ranks of `comm` (None: one alone), which divide experts; rows have the form `payload`.

    Parts are sent one after the other, and experts compute one while the next is on its way.
    """

    comm: Communicator | None
    payload: str = "same"

    def forward(
        self, tokens: Array, weights: Values | None, parts: list[Part], step: Step, compute: Forward
    ) -> tuple[Array, Sent]:
        """Return the weighted sum of what experts make of each of the `tokens`, (tokens, dim).

        It is in the dtype to compute in.  `weights` are those of the entries of the routing, of
        which `parts` is the dispatch; None: 1.  `compute` is of this rank's experts.  If the tokens
        have ``step.numbers``, these are sent with them.
        """
        rows = [dispatch.spread(tokens, part) for part in parts]
        numbers, leaving, kept = self._start_numbers(parts, step), [], []
        arriving = self._start(parts, rows, "dispatch")
        for part, number, arrive in zip(parts, numbers, arriving, strict=True):
            with step.numbered(step.wait(number)):
                out, of_part = compute(step.wait(arrive), part)
            leaving += self._start([part], [out], "combine", is_back=True)
            kept.append(of_part)
        returned = [step.wait(arrive) for arrive in leaving]
        y = namespace_of(tokens).zeros(tokens.shape, dtype=upcast(tokens[:0]).dtype)
        for part, each in zip(parts, returned, strict=True):
            dispatch.add_rows(y, each, part, factors_of(part, weights, y))
        return y, Sent(parts, [] if weights is None else returned, kept)

    def backward(
        self, dy: Array, weights: Values | None, sent: Sent, step: Step, compute: Backward
    ) -> tuple[Array, list[Any]]:
        """Return the derivatives by the tokens, and what experts keep, by part; see `slopes_of`.

        `dy` (tokens, dim) is that by the output, `weights` and `step` are those of `forward`, and
        `sent` is what it kept.  The derivatives are in the dtype to compute in.
        """
        parts = sent.parts
        rows = [dispatch.spread(dy, part, factors_of(part, weights, dy)) for part in parts]
        leaving, rests = [], []
        arriving = self._start(parts, rows, "combine")
        for part, of_part, arrive in zip(parts, sent.kept, arriving, strict=True):
            drows, rest = compute(step.wait(arrive), part, of_part)
            leaving += self._start([part], [drows], "dispatch", is_back=True)
            rests.append(rest)
        dx = namespace_of(dy).zeros(dy.shape, dtype=upcast(dy[:0]).dtype)
        for part, arrive in zip(parts, leaving, strict=True):
            dispatch.add_rows(dx, step.wait(arrive), part)
        return dx, rests

    def _start_numbers(self, parts: Sequence[Part], step: Step) -> list[dispatch.Finish]:
        """Start the exchange of the numbers of the tokens of each part, if they have any."""
        if step.numbers is None:
            return [lambda: None] * len(parts)
        column = step.numbers.reshape(-1, 1)
        rows = [dispatch.spread(column, part) for part in parts]
        return self._replace(payload="same")._start(parts, rows, "numbers")

    def _start(
        self, parts: Sequence[Part], rows: Sequence[Array], label: str, *, is_back: bool = False
    ) -> list[dispatch.Finish]:
        """Start the exchange of each part, in phase `label`; return what waits for them."""
        with collectives.phase(label):
            return [
                dispatch.start(each, part, self.comm, is_back=is_back, payload=self.payload)
                for part, each in zip(parts, rows, strict=True)
            ]


def factors_of(part: Part, weights: Values | None, like: Array) -> Array | None:
    """Return the `weights` of the entries of a `part`, where the array `like` is."""
    return None if weights is None else namespace_of(like).asarray(weights[part.entry])


def slopes_of(weights: Values, dy: Array, sent: Sent) -> Values:
    """Return the derivatives by the `weights`; `dy` is that by the sum of what was returned."""
    found = np.zeros_like(weights)
    for part, each in zip(sent.parts, sent.returned, strict=True):
        found[part.entry] = on_host(dispatch.products(upcast(each), upcast(dy), part))
    return found
