"""A mixture of students: a smaller model with experts learns from a larger one that is trained.

Rajbhandari et al. 2022 (DeepSpeed-MoE), section 4.2: a student with fewer layers imitates the
probabilities of its teacher, and stops doing so before the end of the training ("staged"), because
late in training a small model has to choose between its own loss and that of imitation.

    its = moe_gpt(num_layers=8, mesh=mesh)
    teacher = Teacher(its, checkpoint.load_parameters(path, its, comm))
    student = distilled(moe_gpt(num_layers=6, mesh=mesh), teacher, stop=400_000)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import collectives
from moe.layer import MixtureOfExperts
from parallel import PredictedCall
from parallel.nn import (
    Activations,
    Array,
    ArraySpec,
    CrossEntropy,
    Dropout,
    Layer,
    LayerTraffic,
    Model,
    Sequential,
    Shape,
    Step,
    cast,
    namespace_of,
    on_host,
)
from parallel.nn.functional import flatten_rows, upcast
from parallel.nn.tensor import VocabularyCrossEntropy, Whole
from parallel.runtime.agreement import digest

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
        whole = [on_host(parameters[u]) for u in model.units if not model.split_axes_of(u)]
        states = [layer.state() for layer in model.counting_layers.values()]
        self.digest = digest(*whole, states).hex()
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


class Distillation(Layer):
    """The loss of a student: cross-entropy, and how far its probabilities are from the teacher's.

    The sum of the cross-entropy and of `alpha` times the Kullback-Leibler divergence sum_c t_c log
    (t_c / s_c) of the teacher's probabilities t and the student's s, both means over all targets;
    from step `stop` on the cross-entropy alone, and then the teacher does not run.

    Parameters
    ----------
    teacher : Teacher
    loss : CrossEntropy
        That of the student.
    alpha : float
        At least 0.
    stop : int
        The number of steps after which the student learns alone, at least 0.

    Raises
    ------
    ValueError
        If a number is too small, or if the teacher and the student divide the classes differently.
    """

    saves_input = False
    needs_rows = True

    def __init__(self, teacher: Teacher, loss: CrossEntropy, alpha: float, stop: int) -> None:
        super().__init__()
        if not 0 <= alpha < math.inf or stop < 0:
            raise ValueError(f"alpha is {alpha} and stop is {stop}: they must be at least 0")
        if loss.config() != teacher.loss.config():
            raise ValueError("the teacher and the student must divide the classes alike")
        self.teacher, self.loss, self.alpha, self.stop = teacher, loss, alpha, stop
        self.region = loss.region if isinstance(loss, VocabularyCrossEntropy) else None
        self.comm_axes = teacher.model.comm_axes
        self.context = teacher.model.context if stop else None

    def config(self) -> list[Any]:
        inner = [*self.loss.config(), *self.teacher.config()]
        return [*super().config(), repr(self.alpha), self.stop, *inner]

    def imitates(self, step: int) -> bool:
        """Return whether the teacher is used in the step of this number."""
        return step < self.stop

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        loss, dlogits = self.loss.forward(x, step)
        if step.batch is not None and not self.imitates(step.batch.step):
            return loss, dlogits
        teacher = self.teacher.logits(step, x)
        check_same_shape(teacher.shape, x.shape)
        found = divergence(teacher, x, self.region)
        soft = found.slopes * (self.alpha * step.loss_scale / step.total)
        dlogits = cast(upcast(dlogits) + soft.reshape(x.shape), x.dtype)
        return loss + self.alpha * found.total / step.total, dlogits

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        """Return the derivative by the logits; `dy` is a number, 1 if the loss comes last."""
        return self.loss.backward_input(dy, saved)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return self.loss.activation_bytes(x)

    def check_input(self, x: ArraySpec) -> None:
        if self.stop:
            self.teacher.check_logits(x)

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        forward, backward = self.loss.traffic(x)
        if x.batch is not None and not self.imitates(x.batch.step):
            return LayerTraffic(forward, backward)
        return LayerTraffic(
            (*forward, *self.teacher.traffic(x), *divergence_traffic(x, self.region)), backward
        )


def input_of(logits: ArraySpec) -> ArraySpec:
    """Return the tokens that lead to `logits`."""
    return ArraySpec.tokens(
        logits.shape[0], logits.length, logits.width,
        context=logits.context, rank=logits.rank, batch=logits.batch,
    )  # fmt: skip


def check_same_shape(teacher: Shape, student: Shape) -> None:
    """Raise ValueError unless the logits of a teacher and a student have the same shape."""
    if teacher != student:
        raise ValueError(
            f"the teacher has logits {teacher} and the student {student}: they must be of the same"
            " classes"
        )


class Divergence(NamedTuple):
    """The sum over rows, and the derivatives by the student's logits, (rows, classes)."""

    total: Array  # a number in float64, on the device of the logits
    slopes: Array


def divergence(teacher: Array, student: Array, region: Whole | None) -> Divergence:
    """Return the Kullback-Leibler divergence of logits (..., classes) of two models.

    Ranks of a `region` have some classes of each.  They agree on the largest logits, and then add
    up three numbers for each row.
    """
    xp = namespace_of(student)
    t, s = (upcast(flatten_rows(x)) for x in (teacher, student))
    largest = xp.full((2, t.shape[0]), -math.inf, dtype=t.dtype)
    if t.shape[1]:
        largest = xp.stack([xp.max(x, axis=-1) for x in (t, s)])
    largest = added(largest, "max", region)
    t, s = t - largest[0][:, None], s - largest[1][:, None]
    powers = xp.exp(t), xp.exp(s)
    along = (*powers, powers[0] * (t - s))
    sums = added(xp.stack([xp.sum(x, axis=-1) for x in along]), "sum", region)
    total = xp.sum(sums[2] / sums[0] - xp.log(sums[0]) + xp.log(sums[1])).astype(np.float64)
    return Divergence(total, powers[1] / sums[1][:, None] - powers[0] / sums[0][:, None])


def added(x: Array, op: str, region: Whole | None) -> Array:
    """Return `x` combined over the ranks of a `region`, in place."""
    if region is None:
        return x
    return region.comm.all_reduce(x, op, out=x, algorithm=region.algorithm)


def divergence_traffic(x: ArraySpec, region: Whole | None) -> tuple[PredictedCall, ...]:
    """Return what `divergence` sends for the student's logits `x`."""
    if region is None:
        return ()
    wide, rows = replace(x, width=max(x.width, 4)), math.prod(x.shape[:-1])
    return tuple(region.call("all_reduce", n * rows, wide) for n in (2, 3))


def distilled(student: Model, teacher: Teacher, *, stop: int, alpha: float = 1.0) -> Model:
    """Return a model that trains as `student` does, but learns from a `teacher` too.

    Parameters
    ----------
    student : Model
        For the same inputs and classes as the teacher.  It is not changed, and has the same
        parameters as the result.
    teacher : Teacher
    stop, alpha
        As in `Distillation`.

    Raises
    ------
    ValueError
        As `Distillation` does; if the student's last layer is no cross-entropy; and if the teacher
        was made for another mesh.
    """
    own, its = student.mesh, teacher.model.mesh
    needs_mesh = its.size > 1 or (teacher.model.needs_rows and own.size > 1)
    if needs_mesh and own is not its:
        raise ValueError("the teacher was made for another mesh: make both models with the same")
    *names, last = student.layers
    loss = Distillation(teacher, loss_of(student), alpha, stop)
    layers = {name: student.layers[name] for name in names} | {last: loss}
    made = Model(layers, student.ties, mesh=own)
    made.recompute = student.recompute  # the layers are wrapped already
    return made


def sizes(teacher: Model, student: Model) -> str:
    """Return a sentence with the numbers of parameters of two models, and their ratio.

    Examples
    --------
    >>> from moe import moe_gpt, students
    >>> of = dict(hidden=32, num_experts=4)
    >>> students.sizes(moe_gpt(num_layers=8, **of), moe_gpt(num_layers=6, **of))
    'teacher 220864 parameters, student 170272: 1.30 times as many'
    """
    many, few = teacher.num_parameters, student.num_parameters
    return f"teacher {many} parameters, student {few}: {many / few:.2f} times as many"


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
