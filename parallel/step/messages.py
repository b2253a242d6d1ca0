"""Actions that send and receive what stages of a pipeline compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from parallel.accounts import PredictedCall
from parallel.layout import BatchSize, Message, RankView
from parallel.nn import Model
from parallel.step.action import STARTED_SENDS, Action, Clock
from parallel.step.kept import Kept


@dataclass(frozen=True, kw_only=True)
class StageMessage(Action, ABC):
    """One end of a message between stages: the base class of `Send` and `Receive`.

    Attributes
    ----------
    message : Message
    """

    message: Message

    @property
    @abstractmethod
    def stage(self) -> int:
        """The stage at this end."""

    @property
    def kind(self) -> str:
        return f"{self.code}_{self.message.direction}"

    @property
    def where(self) -> tuple[int, int | None]:
        return self.stage, self.message.micro_batch

    @property
    def arrival(self) -> Hashable:
        """The name of what arrives: `LayerAction.needs` has it."""
        return self.message.direction, self.message.target, self.message.micro_batch


class Send(StageMessage):
    """Send what a stage has computed to the next stage, or to the one before it."""

    code = "SEND"

    @property
    def stage(self) -> int:
        return self.message.source

    def sends(self, view: RankView, batch: BatchSize | None = None) -> Iterator[PredictedCall]:
        layout = view.layout
        for group in view.mesh.ranks("pipe"):
            source = group[view.pipe_index]
            if layout.model_part(source) == view.model_part:
                tokens = layout.tokens_in(batch, self.message.micro_batch, source)
                yield view.predicted(
                    f"{self.phase}/{self.message.label}",
                    "send",
                    layout.inputs_of(tokens)[self.message.layer].size,
                    self.axes,
                    algorithm="",
                    groups=((source, group[self.message.peer]),),
                )

    def like(self, model: Model) -> Action:
        return replace(self, message=self.message._replace(micro_batch=0, tag=0))

    def pass_time(self, clock: Clock, view: RankView) -> None:
        clock.start(self, STARTED_SENDS)

    def keep(self, kept: Kept) -> None:
        """Free the message before, and keep this one until it is sent."""
        what = "sent", self.message.direction, f"{self.stage}"
        nbytes = kept.message_bytes(self.message.layer, self.message.micro_batch)
        kept.free("messages", *what)
        kept.hold(nbytes, "messages", *what)


class Receive(StageMessage):
    """Begin to receive what another stage has computed; the first layer waits for it."""

    code = "RECV"

    @property
    def stage(self) -> int:
        return self.message.target

    def sent_by(self, view: RankView) -> Send:
        """Return the action of the sender, if the rank of a `view` receives."""
        message = self.message._replace(peer=view.pipe_index)
        return Send(message=message, axes=self.axes, phase=self.phase)

    def pass_time(self, clock: Clock, view: RankView) -> None:
        clock.start(self, self.arrival)

    def keep(self, kept: Kept) -> None:
        direction, number = self.message.direction, self.message.micro_batch
        nbytes = kept.message_bytes(self.message.layer, number)
        kept.hold(nbytes, "messages", "received", direction, f"{self.stage}", f"{number}")


class WaitForSends(Action):
    """Wait until all messages to other stages are sent."""

    code = "WAIT"

    @property
    def name(self) -> str:
        return "sends"

    def needs(self, view: RankView) -> list[Hashable]:
        return [STARTED_SENDS]

    def keep(self, kept: Kept) -> None:
        kept.free_all("messages", "sent")
