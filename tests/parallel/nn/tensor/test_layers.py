"""Each layer that ranks divide: values, derivatives, bytes and calls, on 1 to 8 ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import MemoryTracker, Mesh, TrafficMismatch
from parallel.nn import (
    ArraySpec,
    CausalAttention,
    CrossEntropy,
    Embedding,
    Gelu,
    Layer,
    LayerNorm,
    LayerTraffic,
    Linear,
    Model,
    Recompute,
    Residual,
    Sequential,
    Step,
    Unembedding,
)
from parallel.nn.tensor import (
    Columns,
    Divided,
    Rows,
    VocabularyCrossEntropy,
    VocabularyEmbedding,
    Whole,
    region,
)
from tests.parallel.nn.bound_models import STEP, spec_of
from tests.parallel.nn.tensor.split_layers import (
    CLASSES,
    FORMS,
    Case,
    Region,
    alone,
    bound_by_name,
    check_accounts,
    check_values,
    features,
    on_ranks,
    slope_of,
    whole,
)

HEADS, WIDTH = 3, 2


def columns(linear: Linear, at: Region, dim: int = 0, **options: Any) -> Layer:
    return linear if at is None else Columns(linear, at, dim, **options)


def rows(linear: Linear, at: Region, block: int = 1) -> Layer:
    return linear if at is None else Rows(linear, at, block)


def mlp(at: Region) -> dict[str, Layer]:
    return {"up": columns(Linear(5, 7), at), "gelu": Gelu(), "down": rows(Linear(7, 5), at)}


def attention(at: Region) -> dict[str, Layer]:
    return {
        "qkv": columns(Linear(5, (3, HEADS, WIDTH)), at, dim=1),
        "heads": CausalAttention(HEADS, WIDTH),
        "out": rows(Linear(HEADS * WIDTH, 5), at, WIDTH),
    }


def normed(at: Region, layers: dict[str, Layer]) -> Layer:
    return Residual({"norm": LayerNorm(5, () if at is None else at.partial), **layers})


def embedding(at: Region) -> Layer:
    if at is None:
        return Embedding(CLASSES, 6, 5)
    return VocabularyEmbedding(CLASSES, 6, 5, at)


def head(at: Region) -> Layer:
    loss = CrossEntropy() if at is None else VocabularyCrossEntropy(CLASSES, at)
    return Sequential({"out": columns(Unembedding(5, CLASSES), at), "loss": loss})


SHAPE = (2, 4, 5)
CASES = {
    "columns": Case(lambda at: columns(Linear(5, 7), at), SHAPE, out=features(7)),
    "columns of an inner dim": Case(
        lambda at: columns(Linear(5, (3, 4, 2)), at, dim=1), SHAPE, out=features(3, 4, 2, dim=1)
    ),
    "gathered": Case(lambda at: columns(Linear(5, 7), at, is_gathered=True), SHAPE, out=whole),
    "gathered of an inner dim": Case(
        lambda at: columns(Linear(5, (3, 4, 2)), at, dim=1, is_gathered=True), SHAPE, out=whole
    ),
    "gathered of one token": Case(
        lambda at: columns(Linear(5, 7), at, is_gathered=True), (1, 1, 5), out=whole
    ),
    "rows": Case(lambda at: rows(Linear(7, 5), at), (2, 4, 7), into=features(7)),
    "rows in blocks": Case(
        lambda at: rows(Linear(6, 5), at, block=2), (2, 4, 6), into=features(3, 2)
    ),
    "mlp": Case(lambda at: normed(at, mlp(at)), SHAPE),
    "attention": Case(lambda at: normed(at, attention(at)), SHAPE),
    "embedding": Case(embedding, (2, 4), into=whole, num_tokens=CLASSES),
    "head": Case(head, SHAPE),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_form = pytest.mark.parametrize("form", FORMS)


@each_case
@each_form
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.slow
def test_every_layer_has_the_values_bytes_and_calls_that_one_rank_and_formulas_have(
    case: Case, form: str, size: int
) -> None:
    """With more ranks than heads, tokens, columns or classes: some have none."""
    found = on_ranks(case, size, form)
    check_values(case, found, form)
    check_accounts(found)


@each_case
@each_form
def test_every_layer_in_float32_has_the_values_of_one_rank(case: Case, form: str) -> None:
    found = on_ranks(case, 3, form, "float32")
    check_values(case, found, form, "float32")
    check_accounts(found)


@each_form
@pytest.mark.parametrize("name", ["mlp", "attention", "embedding", "head"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_layer_in_two_bytes_has_the_values_of_one_rank(
    name: str, dtype: str, form: str
) -> None:
    """And all ranks have the same bits where they have the same numbers."""
    found = on_ranks(CASES[name], 3, form, dtype)
    check_values(CASES[name], found, form, dtype)
    check_accounts(found)
    if form == "whole":
        for each in found:
            np.testing.assert_array_equal(each.y, found[0].y)


# What is sent, in numbers


def calls_of(name: str, form: str, size: int = 2) -> tuple[list[Any], list[Any]]:
    """The collectives and elements of a layer, forward and backward."""
    traffic = on_ranks(CASES[name], size, form)[0].calls[0]
    forward, backward = ([(c.collective, c.counts) for c in calls] for calls in traffic)
    return forward, backward


N = 2 * 4 * 5  # elements of an array between layers
PARTS = (20, 20)  # those of two ranks


def test_a_block_sends_what_the_papers_say() -> None:
    """Of s b h elements each: 1 + 1 all-reduces; 1 AG + 1 RS each way; or one AG more."""
    for name in ("mlp", "attention"):
        assert calls_of(name, "whole") == ([("all_reduce", N)], [("all_reduce", N)])
        gather, scatter = ("all_gather", PARTS), ("reduce_scatter", PARTS)
        assert calls_of(name, "keep") == ([gather, scatter], [gather, scatter])
        assert calls_of(name, "gather") == ([gather, scatter], [gather, gather, scatter])


def test_the_simplest_model_parallelism_sends_outputs_and_input_gradients() -> None:
    assert calls_of("gathered", "whole") == ([("all_gather", (32, 24))], [("all_reduce", N)])


def test_a_vocabulary_sends_one_vector_or_three_numbers_a_token() -> None:
    """Of the three numbers, two are in one call; `f` of the logits is the call backward."""
    assert calls_of("embedding", "whole") == ([("all_reduce", N)], [])
    assert calls_of("head", "whole") == (
        [("all_reduce", 8), ("all_reduce", 16)],
        [("all_reduce", N)],
    )


# Negative controls


def spoil(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Leave out one reduction."""
    if what == "g":
        monkeypatch.setattr(Whole, "g", lambda self, y: y)
    elif what == "f backward":
        monkeypatch.setattr(Whole, "start_f_backward", lambda self, dx: lambda: dx)
    elif what == "scatter":  # its own part, without those of others
        monkeypatch.setattr(
            region,
            "start_scattered",
            lambda comm, x, dim, counts, algorithm: (
                lambda: x[:, sum(counts[: comm.rank]) : sum(counts[: comm.rank + 1])].copy()
            ),
        )


@pytest.mark.parametrize(
    ("what", "name", "form"),
    [
        ("g", "mlp", "whole"),
        ("g", "attention", "whole"),
        ("g", "embedding", "whole"),
        ("f backward", "mlp", "whole"),
        ("f backward", "head", "whole"),
        ("f backward", "gathered", "whole"),
        ("scatter", "mlp", "keep"),
        ("scatter", "embedding", "gather"),
    ],
)
def test_without_one_sum_the_result_is_another(
    monkeypatch: pytest.MonkeyPatch, what: str, name: str, form: str
) -> None:
    """By more than 1e-6; and it is missing in the record."""
    wanted = alone(CASES[name])
    spoil(monkeypatch, what)
    found = on_ranks(CASES[name], 2, form)
    with pytest.raises(AssertionError):
        check_values(CASES[name], found, form)
    with pytest.raises(TrafficMismatch):
        check_accounts(found)
    if what == "f backward":
        off = np.abs(found[0].dx - wanted[1]).max()
        assert off > 1e-6


class Deaf:
    """A communicator that leaves out one of its calls."""

    def __init__(self, comm: Any, left_out: int | None) -> None:
        self.comm, self.calls = comm, 0
        self.left_out = left_out

    def all_reduce(self, x: Any, *given: Any, **options: Any) -> Any:
        self.calls += 1
        return x if self.calls - 1 == self.left_out else self.comm.all_reduce(x, *given, **options)


@pytest.mark.parametrize("left_out", [None, 0, 1], ids=["none", "the largest", "the sums"])
def test_a_loss_without_one_sum_is_another(left_out: int | None) -> None:
    logits, step = np.random.default_rng(0).standard_normal((2, 4, CLASSES)), CASES["head"].step()
    wanted, _ = CrossEntropy().forward(logits, step)

    def loss(comm: Communicator) -> float:
        at = Whole(Mesh(comm, tensor=2))
        spoiled: Any = SimpleNamespace(
            comm=Deaf(at.comm, left_out), algorithm=at.algorithm, part=at.part
        )
        mine = np.ascontiguousarray(logits[..., at.part(CLASSES)])
        return VocabularyCrossEntropy(CLASSES, spoiled).forward(mine, step)[0]

    off = np.abs(np.array(collectives.run(loss, size=2)) - wanted)
    assert (off > 1e-6).all() if left_out is not None else (off < 1e-14).all()


def test_one_element_less_than_sent_is_noticed() -> None:
    class Modest(Rows):
        def traffic(self, x: ArraySpec) -> LayerTraffic:
            (call,), none = super().traffic(x)
            return LayerTraffic((replace(call, counts=call.counts - 1),), none)

    case = CASES["rows"]._replace(
        make=lambda at: Linear(7, 5) if at is None else Modest(Linear(7, 5), at)
    )
    with pytest.raises(TrafficMismatch):
        check_accounts(on_ranks(case, 2, "whole"))


def test_one_array_more_than_kept_is_noticed() -> None:
    class Hoarder(Columns):
        def forward(self, x: Any, step: Step) -> Any:
            y, (kept, step) = super().forward(x, step)
            return y, (kept, step, y)

        def _own_backward_input(self, dy: Any, saved: Any) -> Any:
            return super()._own_backward_input(dy, saved[:2])

    case = CASES["columns"]._replace(
        make=lambda at: Linear(5, 7) if at is None else Hoarder(Linear(5, 7), at)
    )
    with pytest.raises(AssertionError):
        check_accounts(on_ranks(case, 2, "whole"))


# Derivatives


@each_form
def test_derivatives_are_central_differences(form: str) -> None:
    """Of the loss of two divided layers, along a random direction in each parameter."""

    def layers(at: Region) -> Layer:
        return Sequential({"mlp": normed(at, mlp(at)), "head": head(at)})

    case = Case(layers, SHAPE)

    def fn(comm: Communicator) -> None:
        mesh = Mesh(comm, tensor=2)
        at = FORMS[form](mesh)
        made = bound_by_name(Model({"only": layers(at)}, mesh=mesh))
        layer = made.model.layers["only"]
        x = case.into(case.input("float64"), at, mesh.rank)
        layer.backward(1.0, layer.forward(x, case.step())[1])
        for name, value in made.named_values().items():
            spec = made.model.specs[name]
            way = np.random.default_rng(5).standard_normal(spec.shape)[spec.box(mesh).slices]
            value += STEP * way
            above, _ = layer.forward(x, case.step())
            value -= 2 * STEP * way
            below, _ = layer.forward(x, case.step())
            value += STEP * way
            mine = np.array([np.sum(way * made.named_gradients()[name])])
            if spec.split_axes or spec.partial:
                mine = comm.all_reduce(mine)
            assert float(mine[0]) == pytest.approx((above - below) / (2 * STEP), abs=1e-8), name

    collectives.run(fn, size=2)


# Backward in order


def test_the_sum_is_started_before_the_product_for_the_weights_and_awaited_after() -> None:
    """In a reference step it is awaited first; to the bit with the same result."""

    def fn(comm: Communicator) -> list[Any]:
        mesh, ends = Mesh(comm, tensor=2), []
        for is_reference in (False, True):
            log: list[str] = []

            class Logged(Linear):
                def backward_weight(self, rest: Any, log: list[str] = log) -> None:
                    log.append("product")
                    super().backward_weight(rest)

            class Traced(Whole):
                def start_f_backward(self, dx: Any, log: list[str] = log) -> Any:
                    finish = super().start_f_backward(dx)
                    log.append("start")
                    return lambda: (log.append("wait"), finish())[1]

            made = bound_by_name(Model({"only": Columns(Logged(5, 7), Traced(mesh))}, mesh=mesh))
            layer, waits = made.model.layers["only"], list[float]()
            step = Step(np.zeros((2, 4)), is_reference=is_reference, add_wait=waits.append)
            y, saved = layer.forward(np.ones(SHAPE), step)
            dx = layer.backward(slope_of(y), saved)
            assert len(waits) == 1 and waits[0] > 0
            ends.append((log, dx, made.gradients))
        return ends

    for (log, dx, gradients), (at_once, same_dx, same) in collectives.run(fn, size=2):
        assert log == ["start", "product", "wait"]
        assert at_once == ["start", "wait", "product"]
        np.testing.assert_array_equal(dx, same_dx)
        for unit, x in gradients.items():
            np.testing.assert_array_equal(x, same[unit])


# Alone


@each_form
@pytest.mark.parametrize("name", ["columns", "mlp"])
def test_recomputed_layers_keep_what_they_say(name: str, form: str) -> None:
    """What is kept again is all that the layer saves, but for the input if that is in it."""
    case = CASES[name]

    def fn(comm: Communicator) -> None:
        mesh = Mesh(comm, tensor=3)
        at = FORMS[form](mesh)
        made = bound_by_name(Model({"only": Recompute(case.make(at))}, mesh=mesh))
        layer, x = made.model.layers["only"], case.into(case.input("float64"), at, mesh.rank)
        again: list[Any] = []
        y, (kept, step) = layer.forward(x, replace(case.step(), track=again.append))
        layer.backward(slope_of(y), (kept, step))
        memory = MemoryTracker()
        memory.track("kept", kept)
        memory.track("again", again)
        formula = layer.activation_bytes(
            case.specs(case.input("float64"), at, "float64")[comm.rank]
        )
        assert (formula.saved, formula.extra) == (memory.now["kept"], memory.now["again"])

    collectives.run(fn, size=3)


def test_what_cannot_be_divided_is_refused() -> None:
    at = Whole(Mesh(None))
    with pytest.raises(ValueError, match=r"dim is 3: the output has the shape \(3, 4, 2\)"):
        Columns(Linear(5, (3, 4, 2)), at, 3)
    with pytest.raises(ValueError, match="blocks of 4 do not divide 7 elements"):
        Rows(Linear(7, 5), at, block=4)


def test_ranks_that_mean_different_regions_do_not_agree() -> None:
    """What decides which calls are made is in `config`, which ranks compare."""
    mesh, linear = Mesh(None), Linear(5, (3, 4, 2))
    layers = [
        Columns(linear, Whole(mesh)),
        Columns(linear, Whole(mesh), 1),
        Columns(linear, Whole(mesh), is_gathered=True),
        Columns(linear, Divided(mesh)),
        Columns(linear, Divided(mesh, gathers_again=True)),
        Columns(linear, Whole(mesh, algorithm="recursive_doubling")),
        linear,
    ]
    configs = [str(layer.config()) for layer in layers]
    assert len(set(configs)) == len(layers)
    assert spec_of(np.ones(SHAPE), 8).rank == 0


def test_a_layer_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="Unembedding has no weight whose rows"):
        Rows(Unembedding(5, 6), Whole(Mesh(None, tensor=1)))


def test_layers_of_a_vocabulary_in_other_regions_are_told_apart() -> None:
    """They send something else."""
    mesh = Mesh(None, tensor=1)
    regions = [Whole(mesh), Divided(mesh), Whole(mesh, algorithm="rabenseifner")]
    for make in (
        lambda at: VocabularyEmbedding(CLASSES, 6, 5, at),
        lambda at: VocabularyCrossEntropy(CLASSES, at),
    ):
        assert len({str(make(at).config()) for at in regions}) == 3


def test_a_class_that_is_excluded_adds_nothing_to_a_loss_of_divided_classes() -> None:
    """By a logit of minus infinity, on each rank in turn."""
    step = Step(np.array([[1]]))
    for excluded in (0, 2):
        logits = np.array([[[0.5, 1.0, 2.0]]])
        logits[..., excluded] = -np.inf
        wanted = CrossEntropy().forward(logits, step)[0]
        assert np.isfinite(wanted)

        def loss(comm: Communicator, logits: Any = logits) -> float:
            at = Whole(Mesh(comm, tensor=2))
            layer = VocabularyCrossEntropy(3, at)
            return float(layer.forward(logits[..., at.part(3)].copy(), step)[0])

        np.testing.assert_allclose(collectives.run(loss, size=2), wanted, rtol=1e-12)
