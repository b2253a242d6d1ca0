"""The loss of a student, which learns from the probabilities of its teacher.

Rajbhandari et al. 2022 (DeepSpeed-MoE), section 4.2: a student with fewer layers imitates the
probabilities of its teacher, and stops doing so before the end of the training ("staged"), because
late in training a small model has to choose between its own loss and that of imitation.

    its = moe_gpt(num_layers=8, mesh=mesh)
    teacher = Teacher(its, checkpoint.load_parameters(path, its, comm))
    student = distilled(moe_gpt(num_layers=6, mesh=mesh), teacher, stop=400_000)
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from examples.students.teacher import Teacher, check_same_shape, loss_of
from parallel import PredictedCall
from parallel.nn import (
    Activations,
    Array,
    ArraySpec,
    CrossEntropy,
    Layer,
    LayerTraffic,
    Model,
    Step,
    cast,
    flatten_rows,
    namespace_of,
    upcast,
)
from parallel.nn.tensor import VocabularyCrossEntropy, Whole


class Distillation(Layer):
    """The loss of a student: cross-entropy, and how far its probabilities are from the teacher's.

    The sum of the cross-entropy and of `alpha` times the Kullback-Leibler divergence sum_c t_c log
    (t_c / s_c) of the teacher's probabilities t and the student's s, both means over all targets;
    from step `stop` on the cross-entropy alone, and then the teacher does not run.

    Parameters
    ----------
    teacher : Teacher
    loss : CrossEntropy
        The loss of the student.
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
        total, slopes = divergence(teacher, x, self.region)
        soft = slopes * (self.alpha * step.loss_scale / step.total)
        dlogits = cast(upcast(dlogits) + soft.reshape(x.shape), x.dtype)
        return loss + self.alpha * total / step.total, dlogits

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
    >>> from examples.students import distillation
    >>> from moe import moe_gpt
    >>> of = dict(hidden=32, num_experts=4)
    >>> distillation.sizes(moe_gpt(num_layers=8, **of), moe_gpt(num_layers=6, **of))
    'teacher 220864 parameters, student 170272: 1.30 times as many'
    """
    many, few = teacher.num_parameters, student.num_parameters
    return f"teacher {many} parameters, student {few}: {many / few:.2f} times as many"
