"""The arrays of a call as the other ranks see them: what this rank publishes before the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.devices.allocations import Buffer
from collectives.devices.call import DeviceCall
from collectives.devices.driver import DriverError
from collectives.devices.links import Links
from collectives.devices.loop import Loop
from collectives.devices.row_format import Words
from collectives.devices.shadow import Extent, Shadow
from collectives.engines import BUFFER_RECORD, Operands
from collectives.programs import Aliasing

_ODD, _NONE = -(2**62), -(2**62) + 1  # aliasings that are no offset
_TEXT_BYTES = 160
_CAPTURED = b"the stream is being captured for a graph, which cannot contain this call"
MOST_SCRATCH = 16 << 20  # bytes that a call keeps for the next one of its kind


class Exposed:
    """The arrays of one rank in a call.

    Parameters
    ----------
    links : Links
        The links of the rank.
    call : DeviceCall
        The call.
    why_staged : str
        Why the peers cannot use this rank's arrays; "" if they can.
    """

    def __init__(self, links: Links, call: DeviceCall, why_staged: str = "") -> None:
        self._links, self._why_staged = links, why_staged
        self._constant = _constant_fields(links, call)
        self._shadow: Shadow | None = None
        self._kept: Any = None  # the records of buffers that peers know
        self._pinned: list[int] = []

    def attach(self, operands: Operands) -> None:
        """Set the arrays."""
        arrays = operands.input, operands.output, operands.scratch
        self._operands = operands
        self._extents = [Extent(*operands.backend.extent(x)) for x in arrays]

    def detach(self, when_unused: Callable[[Callable[[], object]], object]) -> None:
        """Release the arrays.

        `when_unused` calls a function when the device does not use their memory.
        """
        del self._operands
        if self._shadow is not None:
            when_unused(self._shadow.give_back)
            self._shadow = None

    def fields(self, loop: Loop, *, is_plan: bool) -> dict[str, Any]:
        """Return the fields of the record of this rank.

        The start of the run has been noted in `loop`.  All runs of a plan have these arrays.
        """
        links, why, fields = self._links, self._why_staged, dict(self._constant)
        if loop.start == loop.names.CAPTURED:
            return {**fields, "why_refused": _CAPTURED}
        if not why and not loop.is_start_noted:
            why = "the driver does not record an event on the stream"
        if not why and not self._is_aligned():
            why = "an array begins between two elements, which kernels cannot read"
        if not why:
            try:
                fields["buffers"] = self.buffers()
                fields["closing"] = (*links.exports.to_close(), 0, 0, 0)[:3]
            except DriverError as error:
                why = str(error)
        is_small = self._operands.scratch.nbytes <= MOST_SCRATCH
        fields["lasts"] = is_plan or (self._shadow is None and is_small)
        return {**fields, "why_staged": why.encode()[:_TEXT_BYTES]}

    def _is_aligned(self) -> bool:
        """Return whether kernels can read the arrays, if the call needs kernels."""
        dtype = self._operands.output.dtype
        unit = dtype.itemsize // (1 + (dtype.kind == "c"))
        extents = self._extents[:2]
        are_aligned = not any(start % unit for start, stop in extents if stop > start)
        return are_aligned or self._operands.function is None

    def buffers(self) -> Any:
        """Return the records of the buffers of this rank, or of their shadow.

        Raises DriverError.
        """
        describe, extents = self._links.describe, self._extents
        try:
            if self._shadow is None:
                return _as_records([describe(start, stop - start) for start, stop in extents])
        except DriverError:
            pass
        shadow = self._shadow = self._shadow or Shadow(self._links.driver, *extents)
        return _as_records(
            [describe(shadow.address(e), e.stop - e.start, shadow.memory) for e in extents]
        )

    def with_shadow(self, rows: Words) -> tuple[Words, int]:
        """Return the rows of a program with copies to and from the shadow, and its first row."""
        if self._shadow is None:
            return rows, 0
        before, after = self._shadow.rows_before(), self._shadow.rows_after()
        return np.concatenate([*before, rows, *after]), len(before)

    # Arrays of calls that follow each other without a meeting

    def keep(self, buffers: Any) -> None:
        """Let the peers keep these buffers open, and no others; with None, none at all."""
        pinned = [] if buffers is None else [number for number in buffers["id"].tolist() if number]
        self._links.exports.pin(pinned)
        self._links.exports.unpin(self._pinned)
        self._kept, self._pinned = buffers, pinned

    def other_buffers(self) -> Any:
        """Return the records of the buffers if the peers do not know them; else None.

        Raises DriverError.
        """
        buffers = self.buffers()
        return None if buffers.tobytes() == self._kept.tobytes() else buffers

    @property
    def can_keep(self) -> bool:
        """Whether its peers may use the arrays as they are, and need not close any."""
        is_full = self._links.exports.is_full
        return self._shadow is None and not is_full and self._is_aligned()


def _as_records(buffers: Sequence[Buffer]) -> Any:
    """Return the records of buffers, as one array."""
    return np.array(buffers, BUFFER_RECORD)


def _constant_fields(links: Links, call: DeviceCall) -> dict[str, Any]:
    """Return the fields of the record that are the same for all runs of a call."""
    aliasing = call.spec.aliasing
    code = {"odd": _ODD, "none": _NONE}
    return {
        "process": links.process,
        "aliasing": aliasing if isinstance(aliasing, int) else code[aliasing],
        "digest": np.void(call.digest),
        "uuid": np.void(links.uuid),
        "what": call.text.encode()[:_TEXT_BYTES],
        "compared": np.void(bytes(16)),
        "closing": (0, 0, 0),
        "why_staged": b"",
        "why_refused": b"",
    }


def aliasing_of(record: Any) -> Aliasing:
    """Return where the output of a rank lies beside its input."""
    aliasing = int(record["aliasing"])
    return "odd" if aliasing == _ODD else "none" if aliasing == _NONE else aliasing
