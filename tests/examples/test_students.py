"""Students that learn from a teacher: on any mesh as on one rank, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from examples import images
from examples.images import v_moe
from examples.students import Distillation, Teacher, distilled
from examples.students.distillation import divergence, sizes
from moe import RoutingLog, mixtures, moe_gpt
from parallel import SGD, Adam, Mesh, Recipe, Sharding, TrafficMismatch, Trainer, checkpoint, gpt
from parallel.nn import BatchRows, CrossEntropy, Linear, Model, Step
from tests.moe.experts import close
from tests.parallel.layouts import CLIP, ROWS, End, Setup, batch, check_as_one_rank
from tests.parallel.nn.bound_models import Values, numerical
from tests.parallel.training import CONTEXT, nothing

STEPS, STOP = 2, 1  # the second step is without the teacher
MODEL: dict[str, Any] = {"hidden": 6, "num_heads": 2, "context": CONTEXT, "every": 1}
Maker = Callable[..., Model]


@cache
def trained(gate: str = "stable") -> tuple[dict[str, Values], dict[str, list[float]]]:
    """The parameters of a teacher of two blocks, and the biases of its experts."""
    model = moe_gpt(num_layers=2, num_experts=4, gate=gate, **MODEL)
    trainer = Trainer(None, model, Recipe(optimizer=partial(Adam, lr=0.01), seed=5))
    trainer.start()
    trainer.train(6, batch, ROWS * CONTEXT, nothing)
    values = {name: x.copy() for name, x in model.named(trainer.parameters).items()}
    return values, {name: layer.state() for name, layer in model.counting_layers.items()}


def teacher_on(mesh: Mesh | None, gate: str = "stable", log: RoutingLog | None = None) -> Teacher:
    model = moe_gpt(num_layers=2, num_experts=4, gate=gate, mesh=mesh, log=log, **MODEL)
    values, state = trained(gate)
    for name, layer in model.counting_layers.items():
        layer.load_state(state[name])
    return Teacher(model, parts_of(model, values))


def parts_of(model: Model, values: dict[str, Values]) -> dict[str, Values]:
    """This rank's parameters by unit, of whole ones by name."""
    return {
        unit: np.concatenate(
            [values[name][box.slices].ravel() for name, box in model.boxes(unit).items()]
        )
        for unit in model.units
    }


class Student(NamedTuple):
    """One block with two experts, which learns from two blocks with four; logs are of one rank."""

    stop: int = STOP
    gate: str = "stable"
    alpha: float = 0.7

    def __call__(self, mesh: Mesh | None) -> Model:
        log, its = RoutingLog(), RoutingLog()
        student = moe_gpt(num_layers=2, num_experts=2, mesh=mesh, log=log, **MODEL)
        teacher = teacher_on(mesh, self.gate, its)
        if mesh is None or mesh.size == 1:
            LOGS[self] = log, its
        for model, known in zip((student, teacher.model), LOGS[self], strict=True):
            for layer in mixtures(model):
                layer.expected = known
        return distilled(student, teacher, stop=self.stop, alpha=self.alpha)


LOGS: dict[Student, tuple[RoutingLog, RoutingLog]] = {}


def setup_of(of: Any, zero: int = 1, **axes: int) -> Setup:
    shared = tuple(axis for axis in ("data", "context", "expert") if axis in axes)
    sharding = partial(Sharding.zero, zero, axes=shared) if shared else Sharding
    recipe = Recipe(num_micro_batches=2, clip=CLIP)
    return Setup(tuple(axes.items()), recipe=recipe, sharding=sharding, of=of, steps=STEPS)


def phases(end: End) -> set[str]:
    assert end.table is not None
    return {row.phase for row in end.table.rows if row.recorded.bytes}


@pytest.mark.parametrize(
    "axes",
    [
        {"expert": 2},
        {"data": 2, "expert": 2},
        {"tensor": 2},
        {"tensor": 3},
        {"expert": 2, "tensor": 2},
        {"pipe": 2},
        {"pipe": 2, "expert": 2},
        {"data": 3},
        {"context": 2},
        {"context": 2, "expert": 2},
        {"pipe": 2, "expert": 2, "tensor": 2},
    ],
    ids=str,
)
@pytest.mark.slow
def test_every_layout_trains_as_one_rank(axes: dict[str, int]) -> None:
    """Losses and parameters of 2 clipped steps; traffic and memory of each, to the byte."""
    ends = check_as_one_rank(setup_of(Student(), **axes))
    if "expert" in axes:
        its = {phase for phase in phases(ends[0]) if "/teacher/" in phase}
        assert "forward/loss/teacher/block1/dispatch" in its
        assert all(phase.startswith("forward/loss/teacher/") for phase in its)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.slow
def test_divided_gradients_and_parameters_train_as_one_rank(zero: int) -> None:
    check_as_one_rank(setup_of(Student(), zero, data=2, expert=2))


@pytest.mark.parametrize("gate", ["gshard", "bias"])
def test_a_teacher_gates_as_in_training_and_learns_nothing(gate: str) -> None:
    """Numbers are drawn for its gate; and its biases stay."""
    for end in check_as_one_rank(setup_of(Student(gate=gate), data=2, expert=2)):
        loss = end.trainer.model.layers["loss"]
        for name, layer in loss.teacher.model.counting_layers.items():
            assert layer.state() == trained(gate)[1][name]


def test_a_teacher_that_stops_sends_nothing_more() -> None:
    """Half of the calls of one that does not; without a teacher the student is another."""
    runs = {stop: setup_of(Student(stop), expert=2) for stop in (0, STOP, STEPS)}
    sent = {}
    for stop, setup in runs.items():
        table = check_as_one_rank(setup)[0].table
        assert table is not None
        rows = [row for row in table.rows if row.phase.startswith("forward/loss/teacher")]
        sent[stop] = sum(row.recorded.calls for row in rows)
    assert sent[0] == 0 and 2 * sent[STOP] == sent[STEPS] > 0
    losses = {stop: setup.alone().losses for stop, setup in runs.items()}
    assert losses[0][0] < losses[STOP][0] == losses[STEPS][0]
    assert losses[STOP][1] != losses[0][1]


def test_without_a_teacher_the_loss_is_that_of_the_student() -> None:
    """With `stop` 0, to the last bit."""

    def plain(mesh: Mesh | None) -> Model:
        model = moe_gpt(num_layers=2, num_experts=2, mesh=mesh, log=RoutingLog(), **MODEL)
        for layer in mixtures(model):
            layer.expected = LOGS[Student(0)][0]
        return model

    student, without = setup_of(Student(0)).alone(), setup_of(plain).alone()
    assert student.losses == without.losses
    for (name, _, a), (other, _, b) in zip(student.parameters, without.parameters, strict=True):
        assert name == other
        np.testing.assert_array_equal(a, b)


def test_a_prediction_without_the_teacher_fails() -> None:
    """The negative control."""

    class Silent(Student):
        def __call__(self, mesh: Mesh | None) -> Model:
            model = super().__call__(mesh)
            loss = model.layers["loss"]
            assert isinstance(loss, Distillation)
            if mesh is not None and mesh.size > 1:
                loss.teacher.traffic = lambda logits: ()  # type: ignore[method-assign]
            return model

    setup = setup_of(Silent(), expert=2)
    setup.alone()
    table = setup.run()[0].table
    assert table is not None
    with pytest.raises(TrafficMismatch):
        table.check()


# The loss


def lone(teacher: Teacher, alpha: float = 0.7, stop: int = 1) -> Distillation:
    return Distillation(teacher, CrossEntropy(), alpha, stop)


def step_of(number: int = 0) -> Step:
    tokens, targets = np.random.default_rng(1).integers(0, 256, (2, 3, CONTEXT))
    rows = BatchRows(number, (range(3),))
    return Step(targets, total=17, context=CONTEXT, tokens=tokens, batch=rows, loss_scale=3.0)


def logits() -> Values:
    return np.random.default_rng(2).standard_normal((3, CONTEXT, 256))


def test_the_loss_is_the_plain_formula() -> None:
    """With the logits of the teacher's layers one after the other."""
    teacher, x, step = teacher_on(None), logits(), step_of()
    loss, _ = lone(teacher).forward(x, step)
    probabilities = []
    for numbers in (teacher.logits(step, x), x):
        powers = np.exp(numbers - numbers.max(axis=-1, keepdims=True))
        probabilities.append(powers / powers.sum(axis=-1, keepdims=True))
    t, s = probabilities
    hard = -np.log(np.take_along_axis(s, step.targets[..., None], axis=-1)).sum()
    assert loss == pytest.approx((hard + 0.7 * (t * np.log(t / s)).sum()) / 17, rel=1e-12)
    assert step.losses == []  # the teacher's own are nobody's


def check_slopes(layer: Distillation, factor: float = 1.0) -> None:
    x, step = logits()[:1, :1, :], step_of()
    step.targets, step.tokens = step.targets[:1, :1], step.tokens[:1, :1]
    step.batch = BatchRows(0, (range(1),))
    _, saved = layer.forward(x, step)
    wanted = 3 * numerical(lambda: layer.forward(x, step)[0], x)
    close(factor * layer.backward(1.0, saved), wanted, 1e-8, "dlogits")


def test_derivatives_are_finite_differences() -> None:
    check_slopes(lone(teacher_on(None)))


def test_a_wrong_derivative_is_noticed() -> None:
    """The negative control: by a ten-thousandth."""
    with pytest.raises(AssertionError):
        check_slopes(lone(teacher_on(None)), 1 + 1e-4)


def test_large_logits_do_not_overflow() -> None:
    x = np.array([[1e4, -1e4, 0.0]])
    result = divergence(-x, x, None)
    assert np.isfinite(result.total) and np.isfinite(result.slopes).all()
    assert divergence(x, x, None).total == 0


def test_a_student_comes_close_to_its_teacher() -> None:
    """Of two students of the same seed, the one that was taught has nearer probabilities."""
    apart = {alpha: distance_after(40, alpha) for alpha in (0.0, 4.0)}
    assert apart[4.0] < 0.7 * apart[0.0]


def distance_after(steps: int, alpha: float) -> float:
    """How far the probabilities of a student are from its teacher's, for other text."""
    teacher = teacher_on(None)
    student = moe_gpt(num_layers=1, num_experts=2, **MODEL)
    model = distilled(student, teacher, stop=steps, alpha=alpha)
    trainer = Trainer(None, model, Recipe(optimizer=partial(Adam, lr=0.01)))
    trainer.start()
    trainer.train(steps, batch, ROWS * CONTEXT, nothing)
    inputs, targets = batch(99, 0, 1)
    step, x = Step(targets, total=1, context=CONTEXT, tokens=inputs), inputs
    for layer in list(model.layers.values())[:-1]:
        x, _ = layer.forward(x, step)
    return divergence(teacher.logits(step, x), x, None).total


def test_images_have_teachers_too() -> None:
    of: dict[str, Any] = {
        "num_classes": 6,
        "image_size": 8,
        "hidden": 6,
        "num_heads": 2,
        "num_experts": 2,
    }
    model = v_moe(num_layers=4, **of)
    teacher = Teacher(model, {unit: model.draw(unit, 3) for unit in model.units})
    student = distilled(v_moe(num_layers=2, **of), teacher, stop=5)
    trainer = Trainer(None, student, Recipe(optimizer=partial(SGD, lr=0.1)))
    trainer.start()
    rows = images.batch(seed=0, step=0, batch_size=4, image_size=8)
    losses = [trainer.step(*rows, total=4) for _ in range(5)]
    assert losses[-1] < losses[0]


# Teachers


def test_a_teacher_is_loaded_from_a_checkpoint_of_any_layout(tmp_path: Path) -> None:
    """Trained on expert x tensor, loaded on one rank and on data x expert; with biases."""

    def train(comm: collectives.Communicator) -> None:
        mesh = Mesh(comm, expert=2, tensor=2)
        model = moe_gpt(num_layers=2, num_experts=4, gate="bias", mesh=mesh, **MODEL)
        sharding = Sharding.zero(1, axes=("expert",))
        recipe = Recipe(optimizer=partial(Adam, lr=0.01), seed=5)
        trainer = Trainer(mesh, model, recipe, sharding=sharding)
        trainer.start()
        trainer.train(6, batch, ROWS * CONTEXT, nothing)
        checkpoint.save(trainer, tmp_path, 6)

    collectives.run(train, size=4)
    path = checkpoint.checkpoint_path(tmp_path, 6)

    def of_teacher(comm: collectives.Communicator) -> Any:
        mesh = Mesh(comm, expert=comm.size)
        model = moe_gpt(num_layers=2, num_experts=4, gate="bias", mesh=mesh, **MODEL)
        teacher = Teacher(model, checkpoint.load_parameters(path, model, comm))
        rows = 6 // comm.size
        mine = range(comm.rank * rows, (comm.rank + 1) * rows)
        tokens = np.random.default_rng(1).integers(0, 256, (6, CONTEXT))[mine.start : mine.stop]
        of_rank = tuple(range(i * rows, (i + 1) * rows) for i in range(comm.size))
        step = Step(tokens, 1, context=CONTEXT, tokens=tokens, batch=BatchRows(0, of_rank))
        return teacher.digest, teacher.logits(step, np.zeros(0)), teacher.nbytes

    ((digest, wanted, nbytes),) = collectives.run(of_teacher, size=1)
    of_ranks = collectives.run(of_teacher, size=2)
    close(np.concatenate([part for _, part, _ in of_ranks]), wanted, 1e-12, "logits")
    ((digest_of_parts, _, nbytes_of_part), (same_digest, _, _)) = of_ranks
    assert same_digest == digest_of_parts
    assert digest_of_parts != digest  # which is of the experts too, where ranks do not divide them
    assert nbytes / 2 < nbytes_of_part < nbytes
    one = teacher_on(None, "bias")
    tokens = np.random.default_rng(1).integers(0, 256, (6, CONTEXT))
    step = Step(tokens, 1, context=CONTEXT, tokens=tokens, batch=BatchRows(0, (range(6),)))
    close(one.logits(step, np.zeros(0)), wanted, 1e-9, "logits")


def test_a_teacher_computes_in_the_dtype_of_the_student() -> None:
    teacher, step = teacher_on(None), step_of()
    assert teacher.logits(step, np.zeros(0, np.float32)).dtype == np.float32
    assert teacher.nbytes == 4 * teacher.model.num_parameters


def test_ranks_with_different_teachers_are_refused() -> None:
    def start(comm: collectives.Communicator) -> str:
        mesh = Mesh(comm, expert=2)
        changed = {name: x + 1e-9 * comm.rank for name, x in trained()[0].items()}
        its = moe_gpt(num_layers=2, num_experts=4, gate="stable", mesh=mesh, **MODEL)
        model = distilled(
            moe_gpt(num_layers=1, mesh=mesh, **MODEL), Teacher(its, parts_of(its, changed)), stop=1
        )
        trainer = Trainer(mesh, model, sharding=Sharding.zero(1, axes=("expert",)))
        try:
            trainer.start()
        except ValueError as error:
            return str(error)
        return ""

    assert all("layers" in reason for reason in collectives.run(start, size=2))


def test_sizes_are_said_with_their_ratio() -> None:
    teacher, student = (
        moe_gpt(num_layers=n, num_experts=4, **MODEL | {"every": 2}) for n in (8, 4)
    )
    many, few = teacher.num_parameters, student.num_parameters
    wanted = f"teacher {many} parameters, student {few}: {many / few:.2f} times as many"
    assert sizes(teacher, student) == wanted


# What is refused


def dense(**options: Any) -> Model:
    return gpt(num_layers=1, hidden=6, num_heads=2, context=CONTEXT, **options)


def zeros_of(model: Model) -> dict[str, Values]:
    return {unit: np.zeros(size) for unit, size in model.unit_sizes.items()}


def teach(student: Model, its: Model, **options: Any) -> Model:
    return distilled(student, Teacher(its, zeros_of(its)), **{"stop": 1} | options)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: teach(dense(), dense(), alpha=-1.0), "alpha is -1.0 and stop is 1"),
    (lambda: teach(dense(), dense(), stop=-1), "stop is -1: they must be at least 0"),
    (lambda: teach(dense(), dense(dropout=0.1)), "a teacher has no dropout"),
    (
        lambda: teach(dense(), moe_gpt(num_layers=1, expert_dropout=0.1, **MODEL)),
        "a teacher has no dropout",
    ),
    (lambda: teach(dense(), Model({"only": Linear(2, 2)})), "the last layer is Linear"),
    (lambda: teach(Model({"only": Linear(2, 2)}), dense()), "the last layer is Linear"),
    (
        lambda: Teacher(dense(), zeros_of(gpt(num_layers=1, hidden=8, context=CONTEXT))),
        "2080 parameters of embedding are given, but the teacher has 1560",
    ),
    (lambda: Teacher(dense(), {}), "no parameters of embedding are given"),
    (
        lambda: Teacher(dense(), zeros_of(dense()) | {"more": np.zeros(3)}),
        "3 parameters of more are given, but the teacher has none",
    ),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_impossible_students_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_teacher_of_another_mesh_is_refused() -> None:
    def make(comm: collectives.Communicator) -> list[str]:
        reasons = []
        for mine, its in [("expert", None), ("expert", "expert"), (None, "expert")]:
            meshes = [None if axis is None else Mesh(comm, **{axis: 2}) for axis in (mine, its)]
            try:
                distilled(
                    moe_gpt(num_layers=1, mesh=meshes[0], **MODEL), teacher_on(meshes[1]), stop=1
                )
            except ValueError as error:
                reasons.append(str(error))
        return reasons

    for reasons in collectives.run(make, size=2):
        assert len(reasons) == 3
        assert all("make both models with the same" in reason for reason in reasons)


def test_logits_of_other_classes_are_refused() -> None:
    its = dense(vocab_size=99)
    model = teach(dense(), its)
    with pytest.raises(ValueError, match="they must be of the same classes"):
        Trainer(None, model)


@pytest.mark.parametrize("stop", [0, 1])
def test_a_teacher_with_fewer_positions_teaches_rows_that_it_has_positions_for(stop: int) -> None:
    its = gpt(num_layers=1, hidden=6, num_heads=2, context=CONTEXT // 2)
    trainer = Trainer(None, teach(dense(), its, stop=stop))
    trainer.layout.check_batch(2, CONTEXT // 2)
    if stop:
        with pytest.raises(ValueError, match=f"positions for {CONTEXT // 2} only"):
            trainer.layout.check_batch(2, CONTEXT)
    else:
        trainer.layout.check_batch(2, CONTEXT)
