"""The options of the training program for mixtures of experts, and files of routings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
import parallel.train
from collectives import Communicator
from collectives.arrays import allocator
from moe import GATES, RoutingLog, mixtures, moe_gpt
from moe.train import COMMAND, mixture_spec
from parallel import Mesh, Sharding, Trainer, text
from parallel.commands.program import report
from parallel.commands.training import Training
from tests.moe.models.test_training import LOGS, Mixture, setup_of
from tests.parallel.test_train import LARGE, SMALL, advised

MODEL = (*SMALL, "--layers", "2", "--experts", "4")


def run(*words: str, ranks: int = 2) -> int:
    """The exit status of a run on threads."""

    def fn(comm: Communicator) -> Any:
        training = Training(comm, COMMAND.parser().parse_args([*MODEL, *words]), mixture_spec)
        table = training.run()
        return report(training, table) if comm.rank == 0 else None

    status: int = collectives.run(fn, size=ranks)[0]
    return status


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_trains(gate: str) -> None:
    assert run("--moe", gate, "--mesh", "expert=2") == 0


@pytest.mark.parametrize(
    "words",
    [
        ("--strategy", "ddp"),
        ("--strategy", "zero2"),
        ("--mesh", "data=2"),
        ("--shared-experts", "1", "--moe-every", "1"),
        ("--payload", "int8"),
        ("--padding", "needed", "--dispatch-parts", "2"),
        ("--capacity-factor", "2.0", "--capacity-rule", "tutel", "--padding", "capacity"),
        ("--recompute",),
        ("--dispatch", "weights"),
        ("--dispatch", "cheaper"),
        ("--dropout", "0.1", "--expert-dropout", "0.4"),
        ("--rows-per-group", "2", "--batch", "8"),
        ("--dispatch", "hierarchical", "--ranks-per-host", "1"),
        ("--strategy", "zero3", "--dispatch", "weights"),
        ("--strategy", "zero3", "--dispatch", "cheaper", "--micro-batches", "2"),
        ("--mesh", "pipe=2", "--schedule", "zb-h1", "--shared-experts", "2"),
        (
            "--mesh",
            "pipe=2,tensor=1",
            "--schedule",
            "zb-h1",
            "--shared-experts",
            "3",
            "--recompute",
        ),
        ("--dispatch", "flat", "--padding", "none", "--payload", "same"),  # the defaults, by name
    ],
)
def test_every_option_sends_what_was_predicted(words: tuple[str, ...]) -> None:
    """Also without an axis for experts: then each rank has all of them."""
    has_axis = {"--strategy", "--mesh"} & set(words)
    assert run("--moe", "switch", *words, *(() if has_axis else ("--mesh", "expert=2"))) == 0


def test_what_experts_share_is_offloaded_once(tmp_path: Path) -> None:
    words = ("--moe", "switch", "--offload-activations", f"disk:{tmp_path}")
    for number in ("1", "2"):
        assert run(*words, "--shared-experts", number) == 0


LARGE_MIXTURE = (*LARGE, "--moe-every", "1", "--moe", "switch")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--padding", "capacity"),
        ("--padding", "needed", "--dispatch-parts", "2"),
        ("--dispatch", "hierarchical", "--ranks-per-host", "1"),
        ("--dispatch", "weights"),
        ("--dispatch", "cheaper"),
        ("--payload", "int8"),
        ("--shared-experts", "2"),
        ("--mesh", "data=2"),
        ("--mesh", "context=2"),
        ("--mesh", "tensor=2"),
        ("--mesh", "pipe=2", "--schedule", "zb-h1", "--shared-experts", "2"),
    ],
)
@pytest.mark.slow
def test_the_memory_of_large_arrays_is_predicted(words: tuple[str, ...]) -> None:
    assert run(*LARGE_MIXTURE, *(() if "--mesh" in words else ("--mesh", "expert=2")), *words) == 0


def test_memory_that_is_rounded_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: arrays are the beginnings of powers of two, which are their bases."""
    empty = allocator.CachingAllocator.empty

    def rounded(self: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        num_bytes = math.prod(shape) * dtype.itemsize
        whole = empty(self, (1 << num_bytes.bit_length(),), np.dtype(np.uint8))
        return whole[:num_bytes].view(dtype).reshape(shape)

    monkeypatch.setattr(allocator.CachingAllocator, "empty", rounded)
    assert run(*LARGE_MIXTURE, ranks=1) == 1


@pytest.mark.parametrize(
    ("words", "rule"),
    [((), "gshard"), (("--capacity-rule", "tutel"), "tutel"), (("--capacity-rule", "none"), None)],
)
def test_the_capacity_rule_is_that_of_the_command_line(
    words: tuple[str, ...], rule: str | None
) -> None:
    """Or that of the gate; beside another option."""
    options = COMMAND.parser().parse_args([*MODEL, "--moe", "stable", "--top-k", "1", *words])
    (layer,) = mixtures(mixture_spec(options, 1).make(None))
    assert (layer.gate.rule, layer.gate.k) == (rule, 1)


def test_deeper_blocks_have_more_experts() -> None:
    """PR-MoE: two ranks lose what one does, and not what they lose with as many in each block."""

    def losses(experts: str, ranks: int) -> list[float]:
        words = (
            "--moe",
            "stable",
            "--experts",
            experts,
            "--moe-every",
            "1",
            "--mesh",
            f"expert={ranks}",
            "--micro-batches",
            "2",
        )

        def fn(comm: Communicator) -> list[float]:
            training = Training(comm, COMMAND.parser().parse_args([*MODEL, *words]), mixture_spec)
            numbers = [layer.gate.num_experts for layer in mixtures(training.model)]
            assert numbers == [int(n) for n in experts.split(",")]
            table = training.run()
            assert comm.rank or report(training, table) == 0
            return training.losses

        found: list[list[float]] = collectives.run(fn, size=ranks)
        return found[0]

    alone = losses("2,5", 1)
    np.testing.assert_allclose(losses("2,5", 2), alone, rtol=1e-12)
    assert np.abs(np.subtract(losses("5,2", 1), alone)).max() > 1e-6


@pytest.mark.parametrize("name", ["expert-data", "expert-model-data:2"])
def test_a_layout_is_a_mesh(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--moe", "switch", "--layout", name, ranks=4) == 0
    mesh = "data=1,expert=2,tensor=2" if name.endswith("2") else "data=1,expert=4"
    assert f"on {mesh}," in capsys.readouterr().out


def test_a_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """Its routing is that of the steps after it, and its biases are those before."""
    words = ("--moe", "bias", "--mesh", "expert=2", "--micro-batches", "2")
    assert run(*words, "--save", str(tmp_path)) == 0
    assert run(*words, "--resume", str(tmp_path), "--steps", "5") == 0


def test_another_routing_gives_another_prediction(tmp_path: Path) -> None:
    """The negative control: the file is of another seed."""
    file = tmp_path / "routing.npz"
    words = ("--moe", "stable", "--mesh", "expert=2")
    assert run(*words, "--save-routing", str(file)) == 0
    assert run(*words, "--routing", str(file)) == 0
    assert run(*words, "--routing", str(file), "--seed", "1") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mesh", "expert=2"), "needs --moe"),
        (("--padding", "needed"), "--padding needs --moe"),
        (("--strategy", "server-sync", "--dropout", "0.1"), "server-sync takes no --dropout"),
        (("--moe", "switch", "--dropout", "1"), "rate of dropout is 1.0"),
        (("--dispatch", "weights"), "--dispatch needs --moe"),
        (("--moe", "switch", "--dispatch", "weights", "--padding", "needed"), "must be none"),
        (
            ("--moe", "gshard", "--rows-per-group", "2", "--batch", "7", "--mesh", "expert=2"),
            "3 rows of a rank are not whole groups of 2",
        ),
        (("--layout", "data"), "--layout needs --moe"),
        (("--routing", __file__), "--routing needs --moe"),
        (("--save-routing", "x"), "--save-routing needs --moe"),
        (("--moe", "switch", "--layout", "data", "--mesh", "expert=2"), "takes no --mesh"),
        (("--moe", "switch", "--layout", "model-data:3"), "3 ranks for each weight"),
        (("--top-k", "2"), "--top-k needs --moe"),
        (("--capacity-rule", "tutel"), "--capacity-rule needs --moe"),
        (("--moe", "bias", "--capacity-rule", "none"), "no option rule, only k"),
        (("--moe", "switch", "--capacity-rule", "none", "--padding", "capacity"), "capacity rule"),
        (("--moe", "switch", "--experts", "2,4"), "2 numbers for 1 blocks with experts"),
        (("--moe", "hash", "--capacity-factor", "2"), "no option capacity_factor, only k"),
        (("--moe", "bias", "--padding", "capacity"), "capacity rule"),
        *(
            (("--moe", "switch", f"--capacity-factor={factor}"), f"capacity_factor is {factor}")
            for factor in ("0", "-1", "nan", "inf")
        ),
        (("--capacity-factor", "0"), "--capacity-factor needs --moe"),
        (("--moe", "bias", "--top-k", "5"), "k is 5"),
        (("--moe", "switch", "--strategy", "hsdp"), "hsdp takes no --moe"),
        (("--moe", "switch", "--strategy", "server-sync"), "takes no --moe"),
        (("--moe", "switch", "--mesh", "tensor=2", "--sequence-parallel"), "takes no --sequence"),
        (("--moe", "switch", "--routing", __file__), "no log of routings"),
    ],
)
def test_options_that_cannot_work_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*words)


@pytest.mark.parametrize(
    ("refused", "kept"),
    [
        (("--strategy", "local-updates"), ()),
        (("--strategy", "server-sync"), ("--bucket-bytes", "9")),
    ],
)
@pytest.mark.slow
def test_a_mesh_that_is_advised_works(refused: tuple[str, ...], kept: tuple[str, ...]) -> None:
    """Each axis, stage and name in the sentence, in place of the words that are refused."""
    words = ("--moe", "switch", "--moe-every", "1", *kept)
    with pytest.raises(ValueError, match="; this works: ") as caught:
        run(*words, *refused)
    ways = [*advised(str(caught.value))]
    assert {axis for _, axis, *_ in ways if axis == "expert=2"}
    for way in ways:
        assert run(*words, *way) == 0, way


def test_without_experts_no_axis_for_them_is_advised() -> None:
    with pytest.raises(ValueError, match="; this works: ") as caught:
        run("--strategy", "hsdp", "--dropout", "0.1")
    assert "tensor" in str(caught.value) and "expert" not in str(caught.value)


def test_a_dense_model_trains_as_by_the_command_for_dense_models(tmp_path: Path) -> None:
    """What is written is the same, but for times and options that only one of them has."""
    written = []
    for number, command in enumerate((COMMAND.main, parallel.train.COMMAND.main)):
        file = tmp_path / f"{number}.json"
        assert command([*SMALL, "--threads", "2", "--zero", "1", "--json", str(file)]) == 0
        written.append(json.loads(file.read_text()))
    mixed, dense = written
    changing = {"json", "seconds", "seconds_per_step", "tokens_per_second"}
    assert mixed.keys() - dense.keys() >= {"moe", "experts", "layout", "routing"}
    assert dense.keys() <= mixed.keys()
    assert [key for key in dense if dense[key] != mixed[key] and key not in changing] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("switch", "--rows-per-group", "2"), "5 rows of a rank are not whole groups of 2"),
        (
            ("switch", "--rows-per-group", "2", "--batch", "8", "--micro-batches", "4"),
            "1 rows of a rank are not whole groups of 2",
        ),
        (("expert-choice", "--experts", "6", "--context", "2"), "a capacity of 0 for 2 tokens"),
        (("v-moe", "--capacity-factor", "0.01"), "a capacity of 0 for 4 tokens"),
        (("switch", "--capacity-rule", "tutel", "--capacity-factor", "0.01"), "a capacity of 0"),
    ],
)
def test_an_impossible_mixture_is_refused_before_the_run(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one sentence; the exit status is 2."""
    with pytest.raises(SystemExit) as caught:
        COMMAND.main(["--threads", "2", *MODEL, "--moe", *words])
    said = capsys.readouterr()
    assert caught.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert message in said.err


class Refused(NamedTuple):
    """A model, the shape of a batch that it cannot compute, and what is said."""

    options: dict[str, Any]
    rows: int
    context: int
    words: str


@pytest.mark.parametrize(
    "case",
    [
        # The second rank has whole groups.
        Refused({"rows_per_group": 2}, 5, 4, "3 rows of a rank are not whole groups of 2"),
        Refused({"gate": "expert-choice"}, 4, 1, "a capacity of 0 for 1 tokens"),
        Refused({"padding": "capacity"}, 4, 5, "5 tokens in a row, but positions for 4 only"),
    ],
)
def test_a_trainer_refuses_an_impossible_batch_before_it_sends(case: Refused) -> None:
    """On all ranks, in the first step, or earlier if it is asked."""

    def fn(comm: Communicator) -> None:
        trainer = trainer_of(comm, **case.options)
        trainer.start()
        with pytest.raises(ValueError, match=case.words):
            trainer.layout.check_batch(case.rows, case.context)
        rows = rows_of(comm, case.rows, case.context)
        with comm.record() as ledger, pytest.raises(ValueError, match=case.words):
            trainer.step(*rows, case.rows * case.context)
        assert not ledger.rows()
        trainer.layout.check_batch(4, 4)

    collectives.run(fn, size=2)


def test_gathered_weights_are_forgotten_after_a_step() -> None:
    """Else they stay alive, although nobody counts them."""

    def fn(comm: Communicator) -> None:
        trainer = trainer_of(comm, dispatch="weights")
        trainer.start()
        trainer.step(*rows_of(comm, 4, 4), 16)
        (layer,) = mixtures(trainer.model)
        gathered: Any = layer.dispatcher
        assert gathered.all.value == gathered.all.gradient == {}

    collectives.run(fn, size=2)


def test_a_trainer_is_refused_if_experts_would_never_take_a_token() -> None:
    """A row has no more tokens than the model has positions."""

    def fn(comm: Communicator) -> None:
        with comm.record() as ledger, pytest.raises(ValueError, match="a capacity of 0 for 4"):
            trainer_of(comm, gate="expert-choice", num_experts=9)
        assert not ledger.rows()

    collectives.run(fn, size=2)


def rows_of(comm: Communicator, rows: int, context: int) -> Any:
    """This rank's part of a batch of both."""
    return text.batch(
        np.arange(256, dtype=np.uint8),
        seed=0,
        step=0,
        batch_size=rows,
        context=context,
        rank=comm.rank,
        num_ranks=comm.size,
    )


def trainer_of(comm: Communicator, **options: Any) -> Trainer:
    """A trainer of a small model with 4 positions, on the ranks of a mesh along ``expert``."""
    mesh = Mesh(comm, expert=2)
    of_model = {"num_experts": 4, "num_layers": 2, "hidden": 4, "num_heads": 2, "context": 4}
    model = moe_gpt(mesh=mesh, **(of_model | options))
    return Trainer(mesh, model, sharding=Sharding.zero(3, axes=("expert",)))


def test_a_log_is_what_was_written() -> None:
    mixture = Mixture("gshard")
    setup_of(mixture, expert=1).alone()
    log = LOGS[mixture]
    again = RoutingLog.from_bytes(log.to_bytes())
    assert [key for key, _ in sorted(again.parts.items())] == sorted(log.parts)
    for key in log.parts:
        one, other = log.whole(*key), again.whole(*key)
        np.testing.assert_array_equal(one.table(), other.table())
        assert (one.num_groups, one.capacity) == (other.num_groups, other.capacity)
    with pytest.raises(ValueError, match="no routing of layer 'none' in step 7"):
        log.whole(7, "none")
