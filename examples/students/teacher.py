"""The teacher: a trained model whose layers run forward, and nothing more."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import collectives
from moe import MixtureOfExperts
from parallel import PredictedCall
from parallel.nn import (
    Array,
    ArraySpec,
    CrossEntropy,
    Dropout,
    Layer,
    Model,
    Sequential,
    Shape,
    Step,
    cast,
    namespace_of,
    on_host,
)

PHASE = "teacher"  # of what a teacher sends


class Teacher:
    """A trained model that runs forward only.

    It gates as in training: what a gate draws depends on the seed, the step and the row.  Its
    mixtures of experts need a log of their own (`RoutingLog`), since they have the names of those
    of the student.

    Parameters
    ----------
    model : Model
        Made with the mesh of the student, unless it is of one rank.  Layers with a state, such as
        the biases of experts, have theirs.
    parameters : mapping of str to array
        This rank's part of each unit (`checkpoint.load_parameters`, or `Trainer.parameters`), which
        must not change.

    Raises
    ------
    ValueError
        If these are not the parameters of the model; if its last layer is no cross-entropy; and for
        a model with dropout, which a model without it can replace.

    Attributes
    ----------
    model : Model
    digest : str
        The SHA-256 of the parameters that ranks do not divide, and of the states.  Ranks compare
        it.
    """

    def __init__(self, model: Model, parameters: Mapping[str, Array]) -> None:
        self.model, self.loss = model, loss_of(model)
        if any(drops(layer) for _, layer in Sequential(model.layers).parts()):
            raise ValueError(
                "a teacher has no dropout: make it without, it has the same parameters"
            )
        sizes = {unit: math.prod(x.shape) for unit, x in parameters.items()}
        for unit in [*model.unit_sizes, *sizes]:
            if sizes.get(unit) != model.unit_sizes.get(unit):
                raise ValueError(
                    f"{sizes.get(unit, 'no')} parameters of {unit} are given, but the teacher has"
                    f" {model.unit_sizes.get(unit, 'none')}"
                )
        self._parameters = dict(parameters)
        self.digest = digest_of(model, parameters)
        self._is_bound = False

    @property
    def nbytes(self) -> int:
        """The bytes of the parameters that this rank computes with."""
        return sum(int(flat.nbytes) for flat in self._parameters.values())

    def logits(self, step: Step, like: Array) -> Array:
        """Return its logits for the input of the model in a `step`.

        They have the dtype of `like`, and are on its device.
        """
        self._bind(like)
        mine = replace(step, losses=[], is_again=True, numbers=None)
        x = step.tokens
        for name, layer in self._layers():
            with collectives.phase(PHASE), collectives.phase(name):
                x, _ = layer.forward(x, mine)
        return x

    def _layers(self) -> list[tuple[str, Layer]]:
        """Return its layers by name, without the loss."""
        return list(self.model.layers.items())[:-1]

    def _bind(self, like: Array) -> None:
        """Let its layers work on parameters of the dtype of `like`, once."""
        if self._is_bound:
            return
        self._parameters = {
            unit: namespace_of(like).asarray(cast(flat, like.dtype))
            for unit, flat in self._parameters.items()
        }
        for name, _ in self._layers():
            self.model.bind(name, self._parameters)
        self._is_bound = True

    def traffic(self, logits: ArraySpec) -> tuple[PredictedCall, ...]:
        """Return what it sends for the input that leads to `logits`."""
        return tuple(
            replace(call, phase="/".join(filter(None, (PHASE, name, call.phase))))
            for name, layer, entering in Sequential(dict(self._layers())).inputs(input_of(logits))
            for call in layer.traffic(entering).forward
        )

    def check_logits(self, logits: ArraySpec) -> None:
        """Raise ValueError unless it makes such `logits` of the input that leads to them."""
        whole = Sequential(dict(self._layers()))
        whole.check_input(input_of(logits))
        check_same_shape(whole.out(input_of(logits)).shape, logits.shape)

    def config(self) -> list[Any]:
        """Return what must be equal on all ranks."""
        return [self.digest, *([name, *layer.config()] for name, layer in self._layers())]


def digest_of(model: Model, parameters: Mapping[str, Array]) -> str:
    """Return the SHA-256 of the parameters that ranks do not divide, and of the layers' states."""
    sha = hashlib.sha256()
    for unit in model.units:
        if not model.split_axes_of(unit):
            sha.update(on_host(parameters[unit]).tobytes())
    sha.update(repr([layer.state() for layer in model.counting_layers.values()]).encode())
    return sha.hexdigest()


def input_of(logits: ArraySpec) -> ArraySpec:
    """Return the tokens that lead to `logits`."""
    return ArraySpec.tokens(
        logits.shape[0],
        logits.length,
        logits.width,
        context=logits.context,
        rank=logits.rank,
        batch=logits.batch,
    )


def check_same_shape(teacher: Shape, student: Shape) -> None:
    """Raise ValueError unless the logits of a teacher and a student have the same shape."""
    if teacher != student:
        raise ValueError(
            f"the teacher has logits {teacher} and the student {student}: they must be of the same"
            " classes"
        )


def drops(layer: Layer) -> bool:
    """Return whether a `layer` is dropout, or has it in its experts."""
    if isinstance(layer, MixtureOfExperts):
        return layer.experts.needs_rows
    return isinstance(layer, Dropout)


def loss_of(model: Model) -> CrossEntropy:
    """Return the last layer of a `model`.  Raises ValueError if it is no cross-entropy."""
    *_, last = model.layers.values()
    if not isinstance(last, CrossEntropy):
        raise ValueError(f"the last layer is {type(last).__name__}: it must be a cross-entropy")
    return last
