"""Send the rows of tokens to experts, let these compute, and add what comes back to the tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import collectives
from collectives import Communicator, SentReceived
from moe.dispatch import ALGORITHM, Part
from moe.payload import decode, encode
from moe.routing import Values
from moe.rows import Received, Rows, SendBuffer, combined, slopes
from parallel.nn import Array, Step, namespace_of, new_array

Finish: TypeAlias = Callable[[], Any]  # waits for a call and returns its result
Forward: TypeAlias = Callable[[Received, Rows, Part], Any]
"""Called with the received rows of a part, and arrays for what experts make of them, which it
fills; returns what they keep."""
Backward: TypeAlias = Callable[[Received, Rows, Part, Any], Any]
"""Called with the derivatives by what was filled, with arrays for those by the received rows, which
it fills, and with what was kept; returns what the experts' weights need."""


class Sent(NamedTuple):
    """What `Exchange.forward` keeps: what experts computed, and by part what they keep."""

    parts: list[Part]
    returned: Array | None  # in the places of the parts; None without weights
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
        numbers = self._start_numbers(parts, step)
        buffers = [SendBuffer(tokens, part) for part in parts]

        def numbered(rows: Received, out: Rows, i: int) -> Any:
            with step.numbered(step.wait(numbers[i]) if numbers else None):
                return compute(rows, out, parts[i])

        labels = ("dispatch", "combine")
        returned, kept = self._there_and_back(buffers, labels, step, numbered)
        y = combined(parts, returned, weights, tokens)
        return y, Sent(parts, None if weights is None else returned, kept)

    def backward(
        self, dy: Array, weights: Values | None, sent: Sent, step: Step, compute: Backward
    ) -> tuple[Array, list[Any]]:
        """Return the derivatives by the tokens, and what experts keep, by part; see `slopes_of`.

        `dy` (tokens, dim) is that by the output, `weights` and `step` are those of `forward`, and
        `sent` is what it kept.  The derivatives are in the dtype to compute in.
        """
        parts, xp = sent.parts, namespace_of(dy)
        factors = [None if weights is None else xp.asarray(weights[x.entry]) for x in parts]
        buffers = [SendBuffer(dy, *each) for each in zip(parts, factors, strict=True)]

        def compute_part(drows: Received, out: Rows, i: int) -> Any:
            return compute(drows, out, parts[i], sent.kept[i])

        labels = ("combine", "dispatch")
        returned, rests = self._there_and_back(buffers, labels, step, compute_part)
        return combined(parts, returned, None, dy), rests

    def _there_and_back(
        self,
        buffers: list[SendBuffer],
        labels: tuple[str, str],
        step: Step,
        compute: Callable[[Received, Rows, int], Any],
    ) -> tuple[Array, list[Any]]:
        """Return what comes back, in the places of the buffers, and what `compute` has returned.

        The rows of a buffer are collected when those of the buffers before are on their way.
        """
        arriving = [self._start(buffer, labels[0]) for buffer in buffers]
        stops, like = list(accumulate(each.part.num_sent for each in buffers)), buffers[0].tokens
        back = new_array((stops[-1], like.shape[1]), like)
        leaving, kept = [], []
        for i, (buffer, arrive) in enumerate(zip(buffers, arriving, strict=True)):
            part, received = buffer.part, step.wait(arrive)
            space = back[stops[i] - part.num_sent : stops[i]]
            away = new_array(received.away.shape, received.away)
            out = Rows(away, space[part.num_away :])
            kept.append(compute(received, out, i))
            leaving.append(self._start_back(out, space, part, labels[1]))
        for finish in leaving:
            step.wait(finish)
        return back, kept

    def _start_numbers(self, parts: list[Part], step: Step) -> list[Finish]:
        """Start the exchange of the numbers of the tokens of each part; nothing without numbers."""
        if step.numbers is None:
            return []
        column, plain = step.numbers.reshape(-1, 1), self._replace(payload="same")
        return [plain._start(SendBuffer(column, part), "numbers") for part in parts]

    def _start(self, buffer: SendBuffer, label: str) -> Finish:
        """Start to send a buffer; return what waits for the rows `Received`."""
        part = buffer.part
        arrive = self._exchanged(buffer.away(), part.counts, label)

        def own(start: int, out: Array) -> None:
            buffer.own(start, out)
            if self.payload != "same":
                out[...] = self._rounded(out)

        return lambda: Received(arrive(), part.num_sent - part.num_away, own)

    def _start_back(self, out: Rows, space: Array, part: Part, label: str) -> Finish:
        """Start to send `out` back to the ranks that it came from, into `space`.

        ``out.own`` is the end of `space` already.
        """
        back = SentReceived(part.counts.received, part.counts.sent)
        into = space[: part.num_away]
        arrive = self._exchanged(out.away, back, label, into)
        if self.payload != "same":
            out.own[...] = self._rounded(out.own)

        def finish() -> None:
            if (found := arrive()) is not into:
                into[...] = found

        return finish

    def _exchanged(
        self, rows: Array, counts: SentReceived, label: str, out: Array | None = None
    ) -> Finish:
        """Start an all-to-all of `rows` in phase `label`, into `out` if the form is their own."""
        if self.comm is None:
            return lambda: rows
        dim, dtype = rows.shape[1], rows.dtype
        out = out if self.payload == "same" else None
        with collectives.phase(label):
            work = self.comm.all_to_all(
                encode(rows, self.payload),
                out=out,
                counts=counts,
                algorithm=ALGORITHM,
                async_op=True,
            )
        return lambda: decode(work.wait(), self.payload, dim, dtype)

    def _rounded(self, rows: Array) -> Array:
        """Return what arrives if `rows` are sent."""
        return decode(encode(rows, self.payload), self.payload, rows.shape[1], rows.dtype)


def slopes_of(weights: Values, dy: Array, sent: Sent) -> Array:
    """Return the derivatives by the `weights`; `dy` is that by the sum of what was returned."""
    assert sent.returned is not None, "forward had weights"
    return slopes(sent.parts, sent.returned, dy, weights)
