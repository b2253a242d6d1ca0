"""What a training run will keep, read off the list of actions of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

from parallel.actions import Action
from parallel.lowering import SENDS
from parallel.nn import Activations, ArraySpec
from parallel.optim.formulas import bytes_moved, offloaded_bytes, state_bytes
from parallel.pipeline import simulate
from parallel.placement import length
from parallel.places import OFFLOADED
from parallel.runtime.micro_batches import number_of
from parallel.runtime.prediction import gather_of, reduction_of
from parallel.runtime.state import BatchSize
from parallel.runtime.trainer import Trainer
from parallel.sharding.collective import rounded_bytes


class Walk:
    """The bytes that a rank keeps while it does one action after another.

    Parameters
    ----------
    trainer : Trainer
    rows, context : int
        The shape of this rank's part of a batch.
    whole : BatchSize, optional
        The batch of all ranks, if a layer needs to know its rows.

    Attributes
    ----------
    now, peak : Counter of str
        The bytes kept at this moment and the most so far, by category.
    """

    def __init__(
        self, trainer: Trainer, rows: int, context: int, whole: BatchSize | None = None
    ) -> None:
        self.trainer = trainer
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._held: dict[tuple[str, ...], int] = {}
        self._reducing: list[str] = []
        self._pending: list[Iterator[int]] = []  # the scratch of the calls that follow each other
        self._gathers: dict[str, Iterator[int]] = {}
        self._activations = activations_of(trainer, rows, context, whole)
        inputs = cache(trainer.model.inputs)  # most micro-batches are equal
        self._inputs = [inputs(x) for x in tokens_of(trainer, rows, context, whole)]
        self._table = {
            "F": self._compute, "B": self._compute, "I": self._compute, "W": self._compute,
            "UNSHARD": self._unshard, "RESHARD": self._reshard, "REDUCE": self._reduce,
            "WAIT": self._wait, "AVERAGE": self._reduce, "UNUSED": self._finish,
            "LOSS": self._finish, "NORM": self._finish, "COUNT": self._finish,
            "SEND_F": self._send, "SEND_B": self._send,
            "RECV_F": self._receive, "RECV_B": self._receive,
        }  # fmt: skip

    def do(self, action: Action) -> None:
        """Let the rank do an action."""
        if action.kind in self._table:
            self._table[action.kind](action)

    def _change(self, category: str, nbytes: int) -> None:
        self.now[category] += nbytes
        self.peak[category] = max(self.peak[category], self.now[category])

    def _hold(self, nbytes: int, category: str, *what: str) -> None:
        self._held[category, *what] = nbytes
        self._change(category, nbytes)

    def _free(self, category: str, *what: str) -> None:
        self.now[category] -= self._held.pop((category, *what), 0)

    def _calls(self, action: Action) -> Iterator[int]:
        """Hold the scratch memory of one call of an action after the other."""
        for call in self.trainer.calls_of(action):
            if (nbytes := call.scratch(self.trainer.rank)) is not None:
                self._hold(nbytes, "scratch", action.kind, action.part)
                yield nbytes
                self._free("scratch", action.kind, action.part)

    def _finish(self, action: Action) -> None:
        for _ in self._calls(action):
            pass

    def _start(self, action: Action) -> Iterator[int]:
        """Start the first call of an action."""
        calls = self._calls(action)
        next(calls, None)
        return calls

    def _compute(self, action: Action) -> None:
        """Change what is kept of a layer; between forward and backward it may be offloaded."""
        kind, layer = action.kind, self._activations[number_of(action)][action.part]
        if kind != "W":
            self._complete(action.part)
            self._arrive("F" if kind == "F" else "B", action)
        if kind in "BW":
            self._open_gradients(action)
        elsewhere = layer.saved if self.trainer.activations.columns else 0
        if kind in "BI":
            self._change(OFFLOADED, -elsewhere)
            self._change("activations", elsewhere)
        for nbytes in layer.changes(kind):
            self._change("activations", nbytes)
        if kind == "F":
            self._change(OFFLOADED, elsewhere)
            self._change("activations", -elsewhere)

    def _open_gradients(self, action: Action) -> None:
        trainer = self.trainer
        for unit in trainer.model.units_of(action.part):
            is_divided = "gradients" in trainer.sharding_of(unit).divided
            if is_divided and ("buffers", "gradient", unit) not in self._held:
                self._hold(trainer.unit_nbytes(unit), "buffers", "gradient", unit)

    def _message(self, action: Action) -> tuple[int, tuple[str, str]]:
        """Return the bytes of a message, and its direction and the stage of the action."""
        message = self.trainer.stages.message(action)
        entering = self._inputs[number_of(action)][message.layer]
        return entering.nbytes, (message.direction, f"{action.stage}")

    def _send(self, action: Action) -> None:
        nbytes, what = self._message(action)
        self._free("messages", "sent", *what)  # the one before it
        self._hold(nbytes, "messages", "sent", *what)

    def _receive(self, action: Action) -> None:
        nbytes, what = self._message(action)
        self._hold(nbytes, "messages", "received", *what, f"{action.micro_batch}")

    def _arrive(self, direction: str, action: Action) -> None:
        """Free the message that enters a stage, once the first layer has it."""
        what = direction, f"{action.stage}", f"{action.micro_batch}"
        self._free("messages", "received", *what)

    def _unshard(self, action: Action) -> None:
        trainer, unit, axes = self.trainer, action.part, action.axes
        if "parameters" not in trainer.sharding.divided:
            self._pending.append(self._start(action))
            return
        self._hold(trainer.unit_nbytes(unit), "buffers", "full", unit)
        arriving = gather_of(trainer, action).buffer_bytes(trainer, unit, axes)
        self._hold(arriving, "buffers", "arriving", unit)
        self._gathers[unit] = self._start(action)

    def _complete(self, layer: str) -> None:
        """Free what was received, and keep the secondary parts of what was gathered."""
        trainer, axes = self.trainer, self.trainer.sharding.secondary_axes
        for unit in trainer.model.units_of(layer):
            next(self._gathers.pop(unit, iter(())), None)
            self._free("buffers", "arriving", unit)
            if axes and ("buffers", "secondary", unit) not in self._held:
                kept = length(trainer.part(unit, axes)) * trainer.dtype.itemsize
                self._hold(kept, "buffers", "secondary", unit)

    def _reshard(self, action: Action) -> None:
        self._free("buffers", "full", action.part)

    def _reduce(self, action: Action) -> None:
        trainer, bucket, axes = self.trainer, action.part, action.axes
        hook = reduction_of(trainer, action)
        if axes == trainer.sharding_of(bucket).shard_axes:
            self._hold(hook.buffer_bytes(trainer, bucket, axes), "buffers", "sent", bucket)
        else:  # replicas sum what they have of it
            size = length(trainer.shard_slice(bucket))
            nbytes = rounded_bytes(trainer, size, trainer.reduce_dtype)
            self._hold(nbytes, "buffers", "sent", bucket)
        if hook.is_blocking:
            self._finish(action)
            self._free("buffers", "sent", bucket)
        else:
            self._pending.append(self._start(action))
        self._reducing.append(bucket)

    def _wait(self, action: Action) -> None:
        if action.part == SENDS:
            for category, *what in [key for key in self._held if key[:2] == ("messages", "sent")]:
                self._free(category, *what)
            return
        while self._pending:
            calls = self._pending.pop(0)
            if next(calls, None) is not None:
                self._pending.append(calls)
        for unit in self._reducing:
            self._free("buffers", "gradient", unit)
            self._free("buffers", "secondary", unit)
            self._free("buffers", "sent", unit)
        self._reducing.clear()


def tokens_of(
    trainer: Trainer, rows: int, context: int, whole: BatchSize | None = None
) -> list[ArraySpec]:
    """Return this rank's tokens of each micro-batch.

    `rows` are those of this rank, and `context` is the length of a whole row.  `whole` is as in
    `Walk`.
    """
    numbers = range(trainer.recipe.num_micro_batches)
    return [trainer.tokens_of(rows, context, k, trainer.rank, whole=whole) for k in numbers]


def activations_of(
    trainer: Trainer, rows: int, context: int, whole: BatchSize | None = None
) -> list[dict[str, Activations]]:
    """Return what each layer keeps, by micro-batch; see `tokens_of`."""
    kept = cache(trainer.model.activation_bytes)  # most micro-batches are equal
    return [kept(x) for x in tokens_of(trainer, rows, context, whole)]


def num_shard_elements(trainer: Trainer) -> int:
    """Return the number of elements that this rank updates."""
    return sum(length(trainer.shard_slice(unit)) for unit in trainer.unit_sizes)


def is_offloaded(trainer: Trainer) -> bool:
    """Return whether masters and optimizer states are elsewhere than the parameters."""
    return trainer.offload.memory is not trainer.memory


def peak_memory(
    trainer: Trainer, rows: int, context: int, batches: Sequence[BatchSize] = ()
) -> dict[str, int]:
    """Return ``trainer.memory.peak`` after steps on batches (`rows`, `context`) of this rank.

    `batches` are those of all ranks in each step; needed if a layer needs to know their rows.
    """
    kept = state_bytes(
        sum(trainer.unit_sizes.values()),
        num_shard_elements(trainer),
        trainer.dtype,
        sharded=trainer.sharding.divided,
        num_states=len(trainer.optimizer.STATES),
        is_offloaded=is_offloaded(trainer),
    )
    if (schedule := trainer.stages.schedule).is_asynchronous:
        kept["parameters"] *= simulate(schedule).versions(trainer.pipe_place)[1]
    peak: Counter[str] = Counter()
    for whole in batches if trainer.model.needs_rows else [None]:
        walk = Walk(trainer, rows, context, whole)
        for action in trainer.actions:
            walk.do(action)
        peak |= walk.peak  # the larger of both
    buffers = peak["buffers"] + trainer.sharding.reduction.state_bytes(trainer)
    of_step = {"activations": peak["activations"], "buffers": buffers}
    of_step |= {name: peak[name] for name in ("scratch", "messages")}
    if trainer.activations.columns:
        of_step[OFFLOADED] = peak[OFFLOADED]
    return kept | of_step | trainer.kept_bytes()


def peak_offloaded_memory(trainer: Trainer) -> dict[str, int]:
    """Return ``trainer.offload.memory.peak`` if updates are offloaded, else an empty dict.

    The buffer for copies from and to a device is as large as the largest part of a unit.
    """
    if not is_offloaded(trainer):
        return {}
    largest = max(length(trainer.shard_slice(unit)) for unit in trainer.unit_sizes)
    num_states = len(trainer.optimizer.STATES)
    kept = offloaded_bytes(num_shard_elements(trainer), trainer.dtype, num_states=num_states)
    return kept | {
        "buffers": trainer.dtype.itemsize * largest * trainer.offload.place.is_cross_device
    }


def offload_traffic(trainer: Trainer, num_updates: int) -> dict[str, int]:
    """Return ``trainer.offload.place.moved`` after `num_updates` updates of all units."""
    place, num_states = trainer.offload.place, len(trainer.optimizer.STATES)
    moved = bytes_moved(
        num_shard_elements(trainer), trainer.dtype,
        num_states=num_states, num_updates=num_updates, num_loads=trainer.offload.num_loads,
    )  # fmt: skip
    return {x: moved[x] if x in place.columns else 0 for x in place.COLUMNS}


def activation_traffic(
    trainer: Trainer, rows: int, context: int, batches: Sequence[BatchSize] = ()
) -> dict[str, int]:
    """Return ``trainer.activations.moved`` after ``trainer.num_batches`` of (`rows`, `context`).

    `batches` are as in `peak_memory`.
    """
    if not trainer.activations.columns:
        return {}
    if trainer.model.needs_rows:
        saved = sum(saved_in_step(trainer, rows, context, whole) for whole in batches)
    else:
        saved = trainer.num_batches * saved_in_step(trainer, rows, context)
    return dict.fromkeys(trainer.activations.columns, saved)


def saved_in_step(trainer: Trainer, rows: int, context: int, whole: BatchSize | None = None) -> int:
    """Return the bytes that the layers of a rank save in one step; see `tokens_of`."""
    layers = activations_of(trainer, rows, context, whole)
    forward = [action for action in trainer.actions if action.kind == "F"]
    return sum(layers[number_of(action)][action.part].saved for action in forward)
