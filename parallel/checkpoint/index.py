"""The index of a checkpoint: what is in it, and what is checked before it is believed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from parallel.runtime.state import State

MAX_STEPS = 2**53  # what JSON numbers represent exactly everywhere


class Index(NamedTuple):
    """The contents of ``checkpoint.json``."""

    step: int  # the number of steps done
    num_skipped: int
    files: dict[str, str]  # the SHA-256 of the file of each rank that saved
    layout: dict[str, list[Any]]  # see `layout_of`
    loss_scale: dict[str, Any]  # its value, and the number of updates since it changed
    optimizer: dict[str, Any]  # the class, the options and the number of updates

    def to_json(self) -> str:
        """Return the text of the file, which contains its own digest."""
        fields = self._asdict()
        return json.dumps(fields | {"digest": _digest(fields)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Index:
        """Return the index in the text of a file.  Raise ValueError unless all of it is valid."""
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("it contains no JSON object")
        digest = fields.pop("digest", None)
        if missing := [name for name in cls._fields if name not in fields]:
            raise ValueError(f"it has no field {missing[0]!r}")
        if unknown := [name for name in fields if name not in cls._fields]:
            raise ValueError(f"it has an unknown field {unknown[0]!r}")
        if digest != _digest(fields):
            raise ValueError("it was changed after it was written: its digest is another")
        index = cls(**fields)
        index.check()
        return index

    def check(self) -> None:
        """Raise ValueError if a field is impossible."""
        number("step", self.step)
        number("num_skipped", self.num_skipped)
        for name in ("files", "layout", "loss_scale", "optimizer"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be an object")
        number("optimizer.steps", self.optimizer.get("steps"))
        number("loss_scale.num_good", self.loss_scale.get("num_good"))
        value = self.loss_scale.get("value")
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise ValueError(f"loss_scale.value is {value!r}: it must be a finite number above 0")


def number(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a possible number of steps."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_STEPS:
        raise ValueError(f"{name} is {str(value)[:40]!r}: it must be an integer of at least 0")


def _digest(fields: Mapping[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True).encode()
    return hashlib.sha256(canonical).hexdigest()


def layout_of(state: State, states: Mapping[str, object]) -> dict[str, list[Any]]:
    """Return what must be equal when a checkpoint is saved and loaded, as JSON represents it.

    `states` are those of the optimizer, by name.
    """
    units = state.model.units.items()
    return {
        "dtype": [state.dtype.name],
        "states": list(states),
        "shapes": [[f"{u}.{k}", list(s.shape)] for u, specs in units for k, s in specs.items()],
        "hook": [name for arrays in state.sharding.reduction.state(state) for name in arrays],
    }
