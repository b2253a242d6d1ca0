"""The options of the training program for mixtures of experts, and files of routings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from moe import GATES, RoutingLog, mixtures
from parallel.train import Training, model_of, parser
from tests.moe.test_training import LOGS, Mixture, setup_of
from tests.parallel.test_train import SMALL

MODEL = (*SMALL, "--layers", "2", "--experts", "4")


def run(*words: str, ranks: int = 2) -> int:
    """The exit status of a run on threads."""

    def fn(comm: Communicator) -> Any:
        training = Training(comm, parser().parse_args([*MODEL, *words]))
        table = training.run()
        return training.report(table) if comm.rank == 0 else None

    status: int = collectives.run(fn, size=ranks)[0]
    return status


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_trains(gate: str) -> None:
    assert run("--moe", gate, "--mesh", "expert=2") == 0


@pytest.mark.parametrize("words", [
    ("--strategy", "ddp"), ("--strategy", "zero2"), ("--mesh", "data=2"),
    ("--shared-experts", "1", "--moe-every", "1"), ("--payload", "int8"),
    ("--padding", "needed", "--dispatch-parts", "2"),
    ("--capacity-factor", "2.0", "--capacity-rule", "tutel", "--padding", "capacity"),
    ("--recompute",), ("--dispatch", "weights"), ("--dispatch", "cheaper"),
    ("--dropout", "0.1", "--expert-dropout", "0.4"), ("--rows-per-group", "2", "--batch", "8"),
    ("--dispatch", "hierarchical", "--ranks-per-host", "1"),
])  # fmt: skip
def test_options(words: tuple[str, ...]) -> None:
    """Also without an axis for experts: then each rank has all of them."""
    has_axis = {"--strategy", "--mesh"} & set(words)
    assert run("--moe", "switch", *words, *(() if has_axis else ("--mesh", "expert=2"))) == 0


@pytest.mark.parametrize(
    ("words", "rule"),
    [((), "gshard"), (("--capacity-rule", "tutel"), "tutel"), (("--capacity-rule", "none"), None)],
)
def test_the_capacity_rule_is_that_of_the_command_line(
    words: tuple[str, ...], rule: str | None
) -> None:
    """Or that of the gate; beside another option."""
    options = parser().parse_args([*MODEL, "--moe", "stable", "--top-k", "1", *words])
    (layer,) = mixtures(model_of(options, None, RoutingLog()))
    assert (layer.gate.rule, layer.gate.k) == (rule, 1)


def test_deeper_blocks_have_more_experts() -> None:
    """PR-MoE: two ranks lose what one does, and not what they lose with as many in each block."""

    def losses(experts: str, ranks: int) -> list[float]:
        words = ("--moe", "stable", "--experts", experts, "--moe-every", "1", "--mesh",
                 f"expert={ranks}", "--micro-batches", "2")  # fmt: skip

        def fn(comm: Communicator) -> list[float]:
            training = Training(comm, parser().parse_args([*MODEL, *words]))
            numbers = [layer.gate.num_experts for layer in mixtures(training.model)]
            assert numbers == [int(n) for n in experts.split(",")]
            table = training.run()
            assert comm.rank or training.report(table) == 0
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
        (("--layout", "data"), "--layout names a mesh for --moe"),
        (("--moe", "switch", "--layout", "data", "--mesh", "expert=2"), "takes no --mesh"),
        (("--moe", "switch", "--layout", "model-data:3"), "3 ranks for each weight"),
        (("--top-k", "2"), "--top-k needs --moe"),
        (("--capacity-rule", "tutel"), "--capacity-rule needs --moe"),
        (("--moe", "bias", "--capacity-rule", "none"), "no option rule, only k"),
        (("--moe", "switch", "--capacity-rule", "none", "--padding", "capacity"), "capacity rule"),
        (("--moe", "switch", "--experts", "2,4"), "2 numbers for 1 blocks with experts"),
        (("--moe", "hash", "--capacity-factor", "2"), "no option capacity_factor, only k"),
        (("--moe", "bias", "--padding", "capacity"), "capacity rule"),
        (("--moe", "bias", "--top-k", "5"), "k is 5"),
        (("--moe", "switch", "--strategy", "hsdp"), "hsdp takes no --moe"),
        (("--moe", "switch", "--strategy", "server-sync"), "takes no --moe"),
        (("--moe", "switch", "--mesh", "tensor=2", "--sequence-parallel"), "takes no --sequence"),
        (("--moe", "switch", "--routing", __file__), "no log of routings"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*words)


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
    with pytest.raises(KeyError, match="no routing of layer 'none' in step 7"):
        log.whole(7, "none")
