"""Send the rows of tokens to experts, let these compute, and add what comes back to the tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import collectives
from collectives import Communicator, SentReceived
from moe.exchange.buffers import Received, Rows, SendBuffer, combined, slopes
from moe.exchange.loads import ALGORITHM
from moe.exchange.parts import Part
from moe.exchange.payload import decode, encode
from moe.routing import Values
from parallel.nn import Array, Step, namespace_of, new_array

Finish: TypeAlias = Callable[[], Any]  # waits for a call and returns its result
Forward: TypeAlias = Callable[[Received, Rows, Part], Any]
"""Called with the received rows of a part, and with arrays for what experts make of them, which it
fills; returns what experts keep."""
Backward: TypeAlias = Callable[[Received, Rows, Part, Any], Any]
"""Called with the derivatives by what was filled, with arrays for the derivatives by the received
rows, which it fills, and with what was kept; returns what the experts' weights need."""


class SavedExchange(NamedTuple):
    """What `Exchange.forward` keeps: what experts computed, and by part what experts keep."""

    parts: list[Part]
    returned: Array | None  # in the rows of the parts; None without weights
    kept: list[Any]

    def slopes_of(self, weights: Values, dy: Array) -> Array:
        """Return the derivatives by the `weights`; `dy` is the derivative by their sum."""
        assert self.returned is not None, "forward had weights"
        return slopes(self.parts, self.returned, dy, weights)


class Exchange(NamedTuple):
    """The ranks of `comm` (None: one alone), which divide experts; rows have the form `payload`.

    Parts are sent one after the other, and experts compute one while the next is being sent.
    """

    comm: Communicator | None
    payload: str = "same"

    def forward(
        self, tokens: Array, weights: Values | None, parts: list[Part], step: Step, compute: Forward
    ) -> tuple[Array, SavedExchange]:
        """Return the weighted sum of what experts make of each of the `tokens`, (tokens, dim).

        The sum is in the dtype to compute in.  `parts` is the dispatch of a routing, whose entries
        have these `weights`; None: 1.  `compute` computes with this rank's experts.  If the tokens
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
        return y, SavedExchange(parts, None if weights is None else returned, kept)

    def backward(
        self, dy: Array, weights: Values | None, saved: SavedExchange, step: Step, compute: Backward
    ) -> tuple[Array, list[Any]]:
        """Return the derivatives by the tokens, and what experts keep, by part.

        `dy` (tokens, dim) is the derivative by the output; `weights` and `step` are as in
        `forward`, and `saved` is what it kept.  The derivatives are in the dtype to compute in.
        """
        parts, xp = saved.parts, namespace_of(dy)
        factors = [None if weights is None else xp.asarray(weights[x.entry]) for x in parts]
        buffers = [SendBuffer(dy, *pair) for pair in zip(parts, factors, strict=True)]

        def compute_part(drows: Received, out: Rows, i: int) -> Any:
            return compute(drows, out, parts[i], saved.kept[i])

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
        """Return what comes back, in the rows of the buffers, and what `compute` has returned.

        The rows of a buffer are collected when the rows before them are being sent.
        """
        arriving = [self._start(buffer, labels[0]) for buffer in buffers]
        stops, like = list(accumulate(x.part.num_sent for x in buffers)), buffers[0].tokens
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
            self._round(out)

        return lambda: Received(arrive(), part.num_sent - part.num_away, own)

    def _start_back(self, out: Rows, space: Array, part: Part, label: str) -> Finish:
        """Start to send `out` back to the ranks that it came from, into `space`.

        ``out.own`` is the end of `space` already.
        """
        back = SentReceived(part.counts.received, part.counts.sent)
        into = space[: part.num_away]
        arrive = self._exchanged(out.away, back, label, into)
        self._round(out.own)

        def finish() -> None:
            if (arrived := arrive()) is not into:
                into[...] = arrived

        return finish

    def _exchanged(
        self, rows: Array, counts: SentReceived, label: str, out: Array | None = None
    ) -> Finish:
        """Start an all-to-all of `rows` in phase `label`, into `out` if they are sent as they are.

        Return what waits for the rows that arrive.
        """
        if self.comm is None:
            return lambda: rows
        dim, dtype = rows.shape[1], rows.dtype
        with collectives.phase(label):
            work = self.comm.all_to_all(
                encode(rows, self.payload),
                out=out if self.payload == "same" else None,
                counts=counts,
                algorithm=ALGORITHM,
                async_op=True,
            )
        return lambda: decode(work.wait(), self.payload, dim, dtype)

    def _round(self, rows: Array) -> None:
        """Change `rows` to what would arrive if they were sent."""
        if self.payload != "same":
            sent = encode(rows, self.payload)
            rows[...] = decode(sent, self.payload, rows.shape[1], rows.dtype)
