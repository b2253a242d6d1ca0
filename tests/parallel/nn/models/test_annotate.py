"""From placements alone follows what ranks send; from Megatron's, what was placed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import Mesh
from parallel.nn import (
    ArraySpec,
    Attention,
    CausalAttention,
    CrossEntropy,
    Gelu,
    LayerNorm,
    Linear,
    Model,
    Residual,
    RingAttention,
    Sequential,
    Step,
    UlyssesAttention,
    annotate,
    gpt,
)
from parallel.nn.tensor import Columns, Rows, Whole
from tests.parallel.nn.bound_models import Values
from tests.parallel.nn.tensor.split_layers import bound_by_name, near

SIZES: dict[str, Any] = {"num_layers": 1, "hidden": 6, "num_heads": 3, "context": 5}
TOKENS = ArraySpec.tokens(2, 5, 8)
MEGATRON = {
    "embedding.token": (0, "tensor"),
    "head.out.table": (0, "tensor"),
    "*.qkv.weight": (2, "tensor"),
    "*.attention.out.weight": (0, "tensor"),
    "*.up.weight": (1, "tensor"),
    "*.down.weight": (0, "tensor"),
}
PLACEMENTS: dict[str, Mapping[str, tuple[int, str]]] = {
    "megatron": MEGATRON,
    "the MLP": {name: MEGATRON[name] for name in ("*.up.weight", "*.down.weight")},
    "attention": {name: MEGATRON[name] for name in ("*.qkv.weight", "*.attention.out.weight")},
    "the vocabulary": {name: MEGATRON[name] for name in ("embedding.token", "head.out.table")},
    "columns of the MLP": {"*.up.weight": (1, "tensor")},
    "heads, then whole": {"*.qkv.weight": (2, "tensor")},
    "a width of heads": {"*.qkv.weight": (3, "tensor")},
    "queries, keys, values": {"*.qkv.weight": (1, "tensor")},
    "columns everywhere": {
        "*.qkv.weight": (2, "tensor"),
        "*.attention.out.weight": (1, "tensor"),
        "*.up.weight": (1, "tensor"),
        "*.down.weight": (1, "tensor"),
        "head.out.table": (0, "tensor"),
    },
    "biases as they follow": MEGATRON | {"*.qkv.bias": (1, "tensor"), "*.up.bias": (0, "tensor")},
}


def loss_and_gradients(model: Model) -> tuple[float, dict[str, Values]]:
    made, (x, targets) = bound_by_name(model), np.random.default_rng(1).integers(0, 256, (2, 2, 5))
    layer = Sequential(model.layers)
    loss, saved = layer.forward(x, Step(targets, targets.size))
    layer.backward(1.0, saved)
    return float(loss), made.named_gradients()


def calls_of(model: Model) -> dict[str, list[list[tuple[str, Any]]]]:
    """The collectives and elements of each layer that sends, forward and backward."""
    return {
        name: [[(call.collective, call.counts) for call in calls] for calls in traffic]
        for name, traffic in model.traffic(TOKENS).items()
        if any(traffic)
    }


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("tensor", [2, 3, 4])
def test_a_model_that_is_divided_by_placements_has_the_result_of_one_rank(
    name: str, tensor: int
) -> None:
    """And each layer sends exactly what it says."""
    alone = gpt(**SIZES)
    wanted_loss, wanted = loss_and_gradients(gpt(**SIZES))

    def fn(comm: Communicator) -> None:
        mesh = Mesh(comm, tensor=tensor)
        mesh["tensor"]
        model = annotate(alone, PLACEMENTS[name], mesh)
        with comm.record() as ledger:
            loss, gradients = loss_and_gradients(model)
        near(loss, wanted_loss, "float64", "loss")
        for key, x in gradients.items():
            near(x, wanted[key][model.specs[key].box(mesh).slices], "float64", key)
        made = [call for each in model.traffic(TOKENS).values() for calls in each for call in calls]
        assert len(made) > 0
        for collective in {call.collective for call in made}:
            nbytes = [
                int(call.matrices(tensor)[1].sum())
                for call in made
                if call.collective == collective
            ]
            totals = comm.all_reduce(
                np.array([sum(row.bytes for row in ledger.rows() if row.collective == collective)])
            )
            assert int(totals[0]) == sum(nbytes)

    collectives.run(fn, size=tensor)


@pytest.mark.parametrize("tensor", [2, 3, 4])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_megatrons_placements_give_the_model_placed_by_hand(tensor: int, is_tied: bool) -> None:
    """Call by call, parameter by parameter, byte by byte, and to the bit of the loss."""

    def fn(comm: Communicator) -> None:
        mesh = Mesh(comm, tensor=tensor)
        by_hand = gpt(**SIZES, is_tied=is_tied, mesh=mesh)
        derived = annotate(gpt(**SIZES, is_tied=is_tied), MEGATRON, mesh)
        assert derived.traffic(TOKENS) == by_hand.traffic(TOKENS)
        assert derived.activation_bytes(TOKENS) == by_hand.activation_bytes(TOKENS)
        assert derived.specs == by_hand.specs and derived.ties == by_hand.ties
        (loss, gradients), (same, others) = map(loss_and_gradients, (derived, by_hand))
        assert loss == same
        for name, x in gradients.items():
            np.testing.assert_array_equal(x, others[name])
        configs = [[layer.config() for layer in m.layers.values()] for m in (derived, by_hand)]
        assert configs[0] == configs[1]

    collectives.run(fn, size=tensor)


def test_other_placements_send_something_else() -> None:
    """The negative control, and what they do send in numbers; three pairs are equal."""

    def fn(comm: Communicator) -> None:
        mesh = Mesh(comm, tensor=2)
        found = {
            name: calls_of(annotate(gpt(**SIZES), PLACEMENTS[name], mesh)) for name in PLACEMENTS
        }
        n = 2 * 5 * 6  # elements of an array between layers
        assert found["the MLP"] == {"block0": [[("all_reduce", n)], [("all_reduce", n)]]}
        assert found["attention"] == found["the MLP"]
        columns = [[("all_gather", (4 * n // 2, 4 * n // 2))], [("all_reduce", n)]]
        assert found["columns of the MLP"] == {"block0": columns}
        heads = [[("all_gather", (2 * n, n))], [("all_reduce", n)]]  # of three heads, 2 and 1
        assert found["heads, then whole"] == {"block0": heads}
        assert found["queries, keys, values"] == {"block0": heads}  # of three as well
        assert len({str(calls) for calls in found.values()}) == len(PLACEMENTS) - 3

    collectives.run(fn, size=2)


@pytest.mark.parametrize("kind", [Attention, CausalAttention])
def test_heads_stay_divided(kind: Any) -> None:
    """Nothing is gathered in front of them, nor behind them."""

    def fn(comm: Communicator) -> None:
        plain = Model({"qkv": Linear(6, (3, 3, 2)), "heads": kind(3), "out": Linear(6, 6)})
        placements = {"qkv.weight": (2, "tensor"), "out.weight": (0, "tensor")}
        traffic = annotate(plain, placements, Mesh(comm, tensor=2)).traffic(ArraySpec((2, 3, 6), 8))
        calls = [call.collective for layer in traffic.values() for call in layer.forward]
        assert calls == ["all_reduce"]

    collectives.run(fn, size=2)


@pytest.mark.parametrize("kind", [RingAttention, UlyssesAttention])
def test_heads_stay_divided_if_ranks_divide_rows_too(kind: Any) -> None:
    """The calls along "context" and "tensor" are those of layers placed by hand."""

    def fn(comm: Communicator) -> None:
        mesh = Mesh(comm, context=2, tensor=2)

        def attention(columns: Any, rows: Any) -> dict[str, Any]:
            return {
                "qkv": columns(Linear(6, (3, 3, 2))),
                "heads": kind(3, mesh, width=2),
                "out": rows(Linear(6, 6)),
            }

        at = Whole(mesh)
        by_hand = attention(lambda x: Columns(x, at, 1), lambda x: Rows(x, at, 2))
        plain = Model(attention(lambda x: x, lambda x: x))
        placements = {"qkv.weight": (2, "tensor"), "out.weight": (0, "tensor")}
        x = ArraySpec((2, 3, 6), 8, context=6, length=3, rank=comm.rank)
        derived = annotate(plain, placements, mesh)
        assert derived.traffic(x) == Model(by_hand, mesh=mesh).traffic(x)
        assert all(any(traffic) for traffic in derived.traffic(x).values())

    collectives.run(fn, size=4)


def test_the_divided_model_is_made_of_the_same_layers_and_changes_none() -> None:
    def fn(comm: Communicator) -> None:
        alone = gpt(**SIZES, recompute=["block*.mlp"])
        kept = str(alone.specs)
        model = annotate(alone, MEGATRON, Mesh(comm, tensor=2))
        assert str(alone.specs) == kept and alone.mesh.size == 1
        mlp: Any = model.layers["block0"]
        mlp = mlp.layers["mlp"].layer  # which runs again
        kinds = [type(layer) for layer in mlp.layers.values()]
        assert kinds == [LayerNorm, Columns, Gelu, Rows] and type(mlp) is Residual
        assert model.recompute == alone.recompute

    collectives.run(fn, size=2)


def test_layers_in_a_layer_of_another_kind_are_copied_too() -> None:
    class Twice(Sequential):
        pass

    alone = Model({"both": Twice({"one": Linear(2, 2), "two": Linear(2, 2)})})
    bound_by_name(alone)
    inner: Any = alone.layers["both"]
    made: Any = annotate(alone, {}, Mesh(None)).layers["both"]
    assert type(made) is Twice
    for name in ("one", "two"):
        assert inner.layers[name].value and made.layers[name] is not inner.layers[name]


ENDS = {
    "features": {"qkv": Linear(6, 8), "gelu": Gelu()},
    "heads": {"qkv": Linear(6, (3, 4, 2)), "heads": CausalAttention(4)},
    "no heads: their number": {"qkv": Linear(6, (3, 4, 2)), "heads": CausalAttention(2)},
    "no heads: their width": {"qkv": Linear(6, (3, 4, 2)), "heads": CausalAttention(2, 4)},
    "no queries, keys and values": {"qkv": Linear(6, (2, 6, 2)), "heads": CausalAttention(4)},
}


@pytest.mark.parametrize("end", ENDS)
def test_what_is_divided_at_the_end_or_by_other_than_heads_is_gathered(end: str) -> None:
    layers: dict[str, Any] = ENDS[end]
    alone, x = Model(layers), np.random.default_rng(1).standard_normal((2, 5, 6))
    bound_by_name(alone)
    step, dim = Step(np.zeros((2, 5), int), 10), 1 if end == "features" else 2
    wanted = Sequential(alone.layers).forward(x, step)[0]

    def fn(comm: Communicator) -> None:
        model = annotate(Model(layers), {"qkv.weight": (dim, "tensor")}, Mesh(comm, tensor=2))
        bound_by_name(model)
        near(Sequential(model.layers).forward(x, step)[0], wanted, "float64", end)

    collectives.run(fn, size=2)


def test_one_rank_along_the_axis_divides_nothing() -> None:
    def fn(comm: Communicator) -> None:
        model = annotate(gpt(**SIZES), MEGATRON, Mesh(comm, data=2, tensor=1))
        assert calls_of(model) == {} and not any(spec.splits for spec in model.specs.values())

    collectives.run(fn, size=2)


REFUSED: list[tuple[Mapping[str, tuple[int, str]], str]] = [
    (
        {"*.down.weight": (0, "tensor")},
        "block0.mlp.down is divided by its input along 'tensor', but what enters it is not",
    ),
    (
        {"*.qkv.weight": (1, "tensor"), "*.attention.out.weight": (0, "tensor")},
        "block0.attention.out is divided by its input along 'tensor', but what enters it is not",
    ),
    ({"head.out.table": (1, "tensor")}, "head.out cannot be divided by dimension 1 of its matrix"),
    ({"*.up.weight": (2, "tensor")}, "block0.mlp.up cannot be divided by dimension 2"),
    ({"*.norm.gain": (0, "tensor")}, r"block0.attention.norm cannot compute with gain divided as"),
    ({"embedding.token": (1, "tensor")}, "embedding cannot compute with token divided as"),
    ({"embedding.position": (0, "tensor")}, "embedding cannot compute with position divided as"),
    ({"*.up.bias": (0, "tensor")}, "block0.mlp.up cannot compute with bias divided as"),
    (
        {"*.up.weight": (1, "tensor"), "*.down.*": (0, "tensor")},
        "block0.mlp.down cannot compute with bias divided as",
    ),
    ({"*.over.weight": (1, "tensor")}, r"there is no parameter '\*.over.weight' to be placed"),
    (
        {"*.up.weight": (1, "tensor"), "block0.mlp.up.*": (0, "tensor")},
        "block0.mlp.up.weight is placed differently by",
    ),
    ({"*.up.weight": (1, "expert")}, "is placed along 'expert', which the mesh lacks"),
    (
        {"*.up.weight": (1, "tensor"), "*.down.weight": (0, "data")},
        "block0.mlp.down is divided by its input along 'data', but what enters it is not",
    ),
]


@pytest.mark.parametrize(("placements", "message"), REFUSED)
def test_what_cannot_be_derived_is_refused_with_the_name_of_the_layer(
    placements: Mapping[str, tuple[int, str]], message: str
) -> None:
    def fn(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=message):
            annotate(gpt(**SIZES), placements, Mesh(comm, data=2, tensor=2))

    collectives.run(fn, size=4)


def test_a_layer_that_is_divided_already_is_refused() -> None:
    def fn(comm: Communicator) -> None:
        mesh = Mesh(comm, tensor=2)
        with pytest.raises(ValueError, match="embedding is divided already"):
            annotate(gpt(**SIZES, mesh=mesh), MEGATRON, mesh)

    collectives.run(fn, size=2)


def test_layers_of_unknown_kinds_get_whole_arrays() -> None:
    """Of a kind that the walk does not know, and before a loss of features in two dimensions."""

    class Cubed(Gelu):
        CUBIC = 1.0

    class Flipped(LayerNorm):
        def forward(self, x: Any, step: Step) -> Any:
            return x[..., ::-1].copy(), None

        def backward_input(self, dy: Any, saved: Any) -> Any:
            return dy[..., ::-1].copy(), (dy, dy)

    def layers() -> dict[str, Any]:
        return {
            "up": Linear(6, (4, 2)),
            "gelu": Cubed(),
            "flip": Flipped(8),
            "out": Linear(8, (3, 2)),
            "loss": CrossEntropy(),
        }

    x, step = np.ones((2, 5, 6)), Step(np.zeros((2, 5), int), 10)
    alone = Model(layers())
    bound_by_name(alone)
    wanted, _ = Sequential(alone.layers).forward(x, step)

    def fn(comm: Communicator) -> None:
        placements = {"up.weight": (1, "tensor"), "out.weight": (1, "tensor")}
        model = annotate(Model(layers()), placements, Mesh(comm, tensor=2))
        bound_by_name(model)
        assert Sequential(model.layers).forward(x, step)[0] == pytest.approx(wanted, rel=1e-13)
        assert [type(layer) for layer in model.layers.values()] == [
            Columns,
            Cubed,
            Flipped,
            Columns,
            CrossEntropy,
        ]

    collectives.run(fn, size=2)


def test_rows_after_columns_of_an_inner_dimension_are_refused() -> None:
    """They would not be those that the rank has; after columns of the first dimension they are."""

    def fn(comm: Communicator) -> None:
        model, mesh = Model({"up": Linear(6, (2, 4)), "down": Linear(8, 6)}), Mesh(comm, tensor=2)
        rows = {"down.weight": (0, "tensor")}
        annotate(model, rows | {"up.weight": (1, "tensor")}, mesh)
        with pytest.raises(ValueError, match="down is divided by its input along 'tensor', but"):
            annotate(model, rows | {"up.weight": (2, "tensor")}, mesh)

    collectives.run(fn, size=2)


def test_parameters_that_are_divided_differently_cannot_be_tied() -> None:
    def fn(comm: Communicator) -> None:
        model = gpt(**SIZES, is_tied=True)
        placements = {"head.out.table": (0, "tensor")}
        with pytest.raises(ValueError, match="have the same shape and be divided alike"):
            annotate(model, placements, Mesh(comm, tensor=2))

    collectives.run(fn, size=2)
