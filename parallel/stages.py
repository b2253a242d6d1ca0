"""The stages of a pipeline: which layers and parameters each rank along the axis ``pipe`` has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from collectives import even_counts
from parallel.actions import Action
from parallel.nn import Model
from parallel.pipeline import InvalidSchedule, Schedule, with_messages


class Message(NamedTuple):
    """What one stage sends to the next, forward, or to the one before it, backward."""

    direction: str  # "F" or "B"
    source: int  # the stages
    target: int
    peer: int  # the place of the other stage
    layer: str  # which has this input, or this derivative
    tag: int

    @property
    def label(self) -> str:
        """The label of the ledger, within that of the direction."""
        return f"stage{self.source}"


class Stages:
    """A model divided into the stages of a schedule.

    Places are those along the axis ``pipe``.  A place has the layers of its stages, and the units
    that these use: several places have a unit if layers of different stages are tied, or if the
    schedule computes a stage in two places.

    Parameters
    ----------
    model : Model
    schedule : Schedule
        Raises InvalidSchedule if it has more stages than the model can fill, and ValueError if it
        updates stages alone that share parameters.

    Attributes
    ----------
    layers : tuple of (tuple of str)
        The names of the layers of each stage.
    stage_of : dict of str to int
        The stage of each layer.
    actions : tuple of (tuple of Action)
        What each place does in a step, with messages.
    layers_of, units_of : list of (list of str)
        The layers and the units of each place, in the order of the model.
    holders : dict of str to (tuple of int)
        The places that have each unit.

    Examples
    --------
    >>> from parallel import gpt
    >>> from parallel.pipeline import make
    >>> Stages(gpt(num_layers=3), make("1f1b", 2, 4)).layers
    (('embedding', 'block0', 'block1'), ('block2', 'head', 'loss'))
    """

    def __init__(self, model: Model, schedule: Schedule) -> None:
        self.model, self.schedule = model, schedule
        try:
            self.layers = divide(list(model.layers), schedule.num_stages)
        except ValueError as error:
            raise InvalidSchedule(str(error), schedule.actions) from None
        self.actions = with_messages(schedule)
        self.stage_of = {name: i for i, names in enumerate(self.layers) for name in names}
        places = range(schedule.num_ranks)
        self.layers_of = [
            [name for stage in schedule.stages_of(i) for name in self.layers[stage]] for i in places
        ]
        self.units_of = [self._units(names) for names in self.layers_of]
        self.holders = {
            unit: tuple(i for i in places if unit in self.units_of[i]) for unit in model.units
        }
        shared = [unit for unit, found in self.holders.items() if len(found) > 1]
        if schedule.is_asynchronous and shared:
            raise ValueError(
                f"pipedream updates each stage alone: {shared[0]} is tied to a layer of another"
            )

    def _units(self, layers: Sequence[str]) -> list[str]:
        used = {unit for name in layers for unit in self.model.units_of(name)}
        return [unit for unit in self.model.units if unit in used]

    def message(self, action: Action) -> Message:
        """Return the message that an action sends or receives."""
        direction, step = action.kind[-1], 1 if action.kind[-1] == "F" else -1
        is_sent = action.kind.startswith("SEND")
        source = action.stage if is_sent else action.stage - step
        target = source + step
        assert action.micro_batch is not None
        peer = self.schedule.rank_of(target if is_sent else source, action.micro_batch)
        layer = self.layers[max(source, target)][0]
        tag = 2 * (action.micro_batch * len(self.layers) + source) + (direction == "B")
        return Message(direction, source, target, peer, layer, tag)

    def completed_units(self, layer: str) -> tuple[str, ...]:
        """Return the units whose gradients are complete once backward of a stage passed `layer`."""
        names = self.layers[self.stage_of[layer]]
        before = names[: names.index(layer)]
        earlier = {unit for name in before for unit in self.model.units_of(name)}
        return tuple(unit for unit in self.model.units_of(layer) if unit not in earlier)


def divide(layers: Sequence[str], num_stages: int) -> tuple[tuple[str, ...], ...]:
    """Divide names of layers into stages; the last layer, the loss, goes with the one before it.

    The others are divided as evenly as possible: the first and the last of them, an embedding and
    its counterpart, are in addition to the others of their stages if each stage has another layer.
    Raises ValueError if a stage would have no layer.
    """
    parts: list[tuple[str, ...]] = [(name,) for name in layers]
    if len(parts) > 1 and num_stages > 1:
        parts[-2:] = [(*parts[-2], *parts[-1])]
    if len(parts) < num_stages:
        raise ValueError(
            f"a model of {len(layers)} layers has at most {len(parts)} stages, not {num_stages}: a"
            " stage would have no layer"
        )
    if len(parts) - 2 >= num_stages:
        parts[:2] = [parts[0] + parts[1]]
        parts[-2:] = [parts[-2] + parts[-1]]
    ends = accumulate(even_counts(len(parts), num_stages), initial=0)
    return tuple(sum(parts[start:stop], ()) for start, stop in pairwise(ends))
