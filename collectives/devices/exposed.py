"""The arrays of a call as the other ranks see them: what this rank publishes before the call."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.devices.call import DeviceCall
from collectives.devices.driver import DriverError
from collectives.devices.links import Links
from collectives.devices.shadow import Extent, Shadow
from collectives.devices.table import Words
from collectives.engines import BUFFER_RECORD, Operands
from collectives.programs import Aliasing

_ODD, _NONE = -(2**62), -(2**62) + 1  # aliasings that are no offset
_TEXT_BYTES = 160


class Exposed:
    """The arrays of one rank in a call.

    `why_staged`: why this rank's arrays cannot be used by its peers; "" if they can.
    """

    def __init__(self, links: Links, call: DeviceCall, why_staged: str = "") -> None:
        self._links, self._why_staged = links, why_staged
        self._constant = _constant_fields(links, call)
        self._shadow: Shadow | None = None
        self._lasting: Any = None

    def attach(self, operands: Operands) -> None:
        """Set the arrays."""
        arrays = operands.input, operands.output, operands.scratch
        self._operands, self._extents = operands, [operands.backend.extent(x) for x in arrays]

    def detach(self) -> None:
        """Release the arrays."""
        del self._operands
        if self._shadow is not None:
            self._shadow.give_back()
            self._shadow = None

    def fields(self, of_caller: int, *, is_plan: bool) -> dict[str, Any]:
        """The fields of the record of this rank.

        `of_caller`: the caller's stream.  `is_plan`: whether all runs have these arrays.
        """
        links, why, fields = self._links, self._why_staged, dict(self._constant)
        try:
            if links.driver.is_capturing(of_caller):
                why = why or "the stream is being captured"
            if not self._is_aligned():
                why = why or "an array begins between two elements, which kernels cannot read"
            fields["buffers"] = self._buffers()
            fields["closing"] = (*links.exports.to_close(), 0, 0, 0)[:3]
        except DriverError as error:
            why = str(error)
        fields["lasts"] = is_plan or self._shadow is None
        return {**fields, "why_staged": why.encode()[:_TEXT_BYTES]}

    def _is_aligned(self) -> bool:
        """Whether kernels can read the arrays, if it needs any."""
        dtype = self._operands.output.dtype
        unit = dtype.itemsize // (1 + (dtype.kind == "c"))
        extents = self._extents[:2]
        are_aligned = not any(start % unit for start, stop in extents if stop > start)
        return are_aligned or self._operands.function is None

    def _buffers(self) -> list[Any]:
        """The records of the buffers of this rank, or of their shadow.  Raises DriverError."""
        links = self._links
        try:
            if self._shadow is None:
                return [links.describe(start, stop - start) for start, stop in self._extents]
        except DriverError:
            pass
        extents = [Extent(*extent) for extent in self._extents]
        shadow = self._shadow = self._shadow or Shadow(links.driver, *extents)
        return [
            links.describe(shadow.address(extent), extent.stop - extent.start, shadow.memory)
            for extent in extents
        ]

    def with_shadow(self, rows: Words) -> tuple[Words, int]:
        """The rows of a program with those that copy to and from the shadow; where it begins."""
        if self._shadow is None:
            return rows, 0
        before, after = self._shadow.rows_before(), self._shadow.rows_after()
        return np.concatenate([*before, rows, *after]), len(before)

    # Arrays that stay where they are

    def keep(self, record: Any) -> None:
        """Let the peers keep what they have opened: the next call may have the same arrays.

        `record`: that of this rank.
        """
        self._lasting = record["buffers"].tobytes()
        self._pinned = [number for number in record["buffers"]["id"].tolist() if number]
        self._links.exports.pin(self._pinned)

    def forget(self) -> None:
        """Undo `keep`."""
        if self._lasting is not None:
            self._links.exports.unpin(self._pinned)
            self._lasting = None

    @property
    def is_unchanged(self) -> bool:
        """Whether the arrays are those of the call that was followed by `keep`."""
        try:
            return bool(self._lasting == np.array(self._buffers(), BUFFER_RECORD).tobytes())
        except DriverError:
            return False


def _constant_fields(links: Links, call: DeviceCall) -> dict[str, Any]:
    """The fields of the record that are the same for all runs of a call."""
    aliasing = call.spec.aliasing
    code = {"odd": _ODD, "none": _NONE}
    return {
        "process": links.process,
        "aliasing": aliasing if isinstance(aliasing, int) else code[aliasing],
        "digest": np.void(call.digest),
        "uuid": np.void(links.uuid),
        "what": call.text.encode()[:_TEXT_BYTES],
        "closing": (0, 0, 0),
    }


def aliasing_of(record: Any) -> Aliasing:
    """Where the output of a rank lies beside its input."""
    aliasing = int(record["aliasing"])
    return "odd" if aliasing == _ODD else "none" if aliasing == _NONE else aliasing
