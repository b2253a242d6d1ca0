"""The stages of a pipeline: which layers and parameters each rank along the axis ``pipe`` has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from collectives import even_counts
from parallel.nn import Model
from parallel.pipeline import InvalidSchedule, Schedule, with_messages
from parallel.pipeline import actions as of_stage


class Message(NamedTuple):
    """What one stage sends to the next one, forward, or to the one before, backward.

    Attributes
    ----------
    direction : str
        ``"F"`` or ``"B"``.
    source, target : int
        The stage that sends, and the stage that receives.
    micro_batch : int
    peer : int
        The index along the axis ``pipe`` of the rank at the other end.
    layer : str
        The layer whose input is sent, or whose derivative by the input.
    tag : int
    """

    direction: str
    source: int
    target: int
    micro_batch: int
    peer: int
    layer: str
    tag: int

    @property
    def label(self) -> str:
        """The label of the ledger, within the label of the direction."""
        return f"stage{self.source}"


class Stages:
    """A model divided into the stages of a schedule.

    A rank along the axis ``pipe`` has the layers of its stages, and the units that these layers
    use.  Several ranks have a unit if layers of different stages are tied, or if the schedule
    computes a stage on two ranks.

    Parameters
    ----------
    model : Model
    schedule : Schedule
        Raises InvalidSchedule if it has more stages than the model can fill, and ValueError if it
        updates stages alone and stages share parameters.

    Attributes
    ----------
    layers : tuple of (tuple of str)
        The names of the layers of each stage.
    stage_of : dict of str to int
        The stage of each layer.
    actions : tuple of (tuple of pipeline.actions.Action)
        What each rank along ``pipe`` does in a step, with messages.
    layers_of, units_of : list of (list of str)
        The layers and the units of each rank along ``pipe``, in the order of the model.
    holders : dict of str to (tuple of int)
        The indices along ``pipe`` of the ranks that have each unit.

    Examples
    --------
    >>> from parallel import gpt
    >>> from parallel.layout import Stages
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
        ranks = range(schedule.num_ranks)
        self.layers_of = [
            [name for stage in schedule.stages_of(i) for name in self.layers[stage]] for i in ranks
        ]
        self.units_of = [self._units(names) for names in self.layers_of]
        self.holders = {
            unit: tuple(i for i in ranks if unit in self.units_of[i]) for unit in model.units
        }
        shared = [unit for unit, indices in self.holders.items() if len(indices) > 1]
        if schedule.is_asynchronous and shared:
            raise ValueError(
                f"pipedream updates each stage alone: {shared[0]} is tied to a layer of another"
            )

    def _units(self, layers: Sequence[str]) -> list[str]:
        used = {unit for name in layers for unit in self.model.units_of(name)}
        return [unit for unit in self.model.units if unit in used]

    def message(self, end: of_stage.Message) -> Message:
        """Return the message that has this `end`: a send or a receive of the schedule."""
        other, k = end.other_end, end.micro_batch
        is_sent = isinstance(end, of_stage.Send)
        source, target = (end.stage, other.stage) if is_sent else (other.stage, end.stage)
        layer = self.layers[max(source, target)][0]
        tag = 2 * (k * len(self.layers) + source) + (end.direction == "B")
        peer = self.schedule.rank_of(other.stage, k)
        return Message(end.direction, source, target, k, peer, layer, tag)

    def completed_units(self, layer: str) -> tuple[str, ...]:
        """Return the units with complete gradients once backward of a stage has passed `layer`."""
        names = self.layers[self.stage_of[layer]]
        before = names[: names.index(layer)]
        earlier = {unit for name in before for unit in self.model.units_of(name)}
        return tuple(unit for unit in self.model.units_of(layer) if unit not in earlier)


def divide(layers: Sequence[str], num_stages: int) -> tuple[tuple[str, ...], ...]:
    """Divide names of layers into stages; the last layer, the loss, goes with the one before it.

    Layers are divided as evenly as possible; the first and the last, an embedding and its
    counterpart, do not count if each stage has another layer.
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
