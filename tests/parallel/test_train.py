"""The training program, on threads as ranks: what it shows, writes, refuses and returns."""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import mpi4py.run
import numpy as np
import pytest
from safetensors.numpy import load_file

import collectives
from collectives import Communicator
from parallel import Sharding, Trainer, text
from parallel.checkpoint import METADATA_FILE, Checkpoint
from parallel.commands import presets, ranks
from parallel.commands.program import report
from parallel.commands.training import Training
from parallel.optim import LossScale
from parallel.optim.storage import READ, TO_DEVICE, TO_HOST
from parallel.predict import memory as predictions
from parallel.sharding import AllReduce, HalfPrecision, Int8Blocks, PowerSGD
from parallel.step import SumLoss
from parallel.train import COMMAND

ROOT = Path(__file__).parent.parent.parent
TEXT = argparse.__file__  # a hundred thousand bytes or so, quickly read
SMALL = (
    "--text",
    TEXT,
    "--layers",
    "1",
    "--hidden",
    "8",
    "--heads",
    "2",
    "--context",
    "4",
    "--batch",
    "9",
    "--steps",
    "3",
)


class Run(NamedTuple):
    """Of a whole run, on rank 0."""

    status: int
    said: str
    losses: list[float]
    training: Training


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the program on so many ranks, with a small model; later words outweigh earlier ones."""

    def run(*words: str | Path, ranks: int = 2) -> Run:
        def fn(comm: Communicator) -> Any:
            training = training_of(comm, *words)
            table = training.run()
            return training, report(training, table) if comm.rank == 0 else None

        training, status = collectives.run(fn, size=ranks)[0]
        return Run(status, capsys.readouterr().out, training.losses, training)

    return run


def training_of(comm: Communicator, *words: str | Path) -> Training:
    options = COMMAND.parser().parse_args([*SMALL, "--wide", *map(str, words)])
    return Training(comm, options)


# Every strategy

OTHER_RANKS = {"serial": 1, "hsdp": 4, "zeropp": 4}  # 3 otherwise
ON_THREADS = [name for name in presets.STRATEGIES if name != "elastic"]


@pytest.mark.parametrize("strategy", ON_THREADS)
def test_every_strategy_accounts_for_all_it_sends_and_keeps(run: Any, strategy: str) -> None:
    ranks = OTHER_RANKS.get(strategy, 3)
    done = run("--strategy", strategy, ranks=ranks)
    assert done.status == 0
    size, entropy = done.training.model.num_parameters, text.unigram_entropy(text.load(TEXT))
    for words in (
        f"{strategy}, ranks {ranks}, float64, seed 0, batch 9: {size} parameters",
        "step     1  loss 5.",
        "step     3  loss 5.",
        f"unigram entropy {entropy:.4f}",
        "tokens/s",
        "f = by formula, c = counted",
        "p = predicted, r = recorded, o = observed",
        "predicted = recorded, to the byte (two columns compared",
        "memory: formula = counted, to the byte; parameters: equal, to the bit",
    ):
        assert words in done.said


# Of arrays that the allocator makes: of more than 256 KiB, and no power of two.
LARGE = ("--hidden", "48", "--context", "40", "--batch", "40", "--layers", "2", "--steps", "1")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--strategy", "zero3"),
        ("--mesh", "tensor=2"),
        ("--recompute",),
        ("--dropout", "0.1"),
        ("--mesh", "tensor=2", "--sequence-parallel"),
        ("--mesh", "tensor=2", "--sequence-parallel", "gather"),
        ("--mesh", "context=2"),
        ("--mesh", "context=2", "--attention", "ulysses"),
        ("--mesh", "pipe=2", "--schedule", "zb-h1", "--micro-batches", "2"),
    ],
)
def test_the_memory_of_large_arrays_is_predicted(run: Any, words: tuple[str, ...]) -> None:
    assert run(*LARGE, *words).status == 0


EXACT = ["server-sync", "ddp", "zero1", "zero2", "zero3", "hsdp"]


def test_losses_are_those_of_the_serial_program(run: Any) -> None:
    words = ["--micro-batches", "2", "--clip", "0.5", "--tied", "--recompute"]
    serial = run("--strategy", "serial", *words, ranks=1)
    for strategy in EXACT:
        done = run("--strategy", strategy, *words)
        np.testing.assert_allclose(done.losses, serial.losses, rtol=1e-12)


def test_the_model_learns_more_than_the_frequencies_of_bytes(run: Any) -> None:
    words = ["--hidden", "32", "--context", "8", "--batch", "32", "--steps", "90", "--lr", "2e-2"]
    done = run("--strategy", "serial", *words, ranks=1)
    assert np.mean(done.losses[-20:]) < text.unigram_entropy(text.load(TEXT)) - 0.4


def test_a_model_that_hardly_moves_learns_less_than_that(run: Any) -> None:
    """The negative control."""
    done = run("--strategy", "serial", "--steps", "40", "--lr", "1e-6", ranks=1)
    assert np.mean(done.losses[-20:]) > text.unigram_entropy(text.load(TEXT))


# What differs is status 1


def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategy does not predict that it sends its loss."""
    monkeypatch.setattr(SumLoss, "sends", lambda self, view, batch=None: [])


def more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it keeps a byte that nobody sees."""
    monkeypatch.setattr(AllReduce, "state_bytes", lambda self, view: 1)


def other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's differ in one bit in the end."""
    really = Trainer.train

    def train(self: Trainer, *given: Any) -> list[float]:
        losses = really(self, *given)
        if self.rank == 1:
            first = self.parameters["block0"]
            first[-1] = np.nextafter(first[-1], np.inf)
        return losses

    monkeypatch.setattr(Trainer, "train", train)


def more_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes from the disk, for which the formula has a byte more."""
    really = predictions.bytes_moved

    def bytes_moved(*given: Any, **options: Any) -> dict[str, int]:
        moved = really(*given, **options)
        return moved | {READ: moved[READ] + 1}

    monkeypatch.setattr(predictions, "bytes_moved", bytes_moved)


DIFFERENCES = {
    unsaid: "TrafficMismatch: predicted, recorded and observed differ:\n"
    "loss/all_reduce: predicted 0 calls, 0 messages, 0 bytes; recorded 3 calls, 6 messages, 96",
    more_memory: "these differ: buffers of rank 0: 1 by formula, 0 counted; buffers of rank 1: 1",
    other_parameters: "these differ: parameters of block0 on ranks 0 and 1",
    more_moved: "these differ: read from disk of rank 0: ",
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_difference_is_said_and_the_status_is_1(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, difference: Any
) -> None:
    difference(monkeypatch)
    done = run("--offload", f"disk:{tmp_path}")
    assert done.status == 1
    assert DIFFERENCES[difference] in done.said
    assert "equal, to the bit" not in done.said


# Files


def test_json_holds_arguments_losses_memory_and_traffic(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    done = run("--strategy", "zero1", "--json", file, "--offload", "host", ranks=3)
    written = json.loads(file.read_text())
    assert written["losses"] == done.losses and len(done.losses) == written["steps"] == 3
    assert (written["strategy"], written["ranks"], written["first_step"]) == ("zero1", 3, 0)
    assert (written["json"], written["text"], written["seed"]) == (str(file), TEXT, 0)
    assert written["unigram_entropy"] == text.unigram_entropy(text.load(TEXT))
    assert written["tokens_per_second"] == pytest.approx(3 * 9 * 4 / written["seconds"])
    assert 0 < written["seconds_per_step"] < written["seconds"]

    psi = written["parameters"]
    assert psi == done.training.model.num_parameters
    kept, moved = written["ranks_kept"], written["ranks_moved"]
    assert len(kept) == len(moved) == 3
    assert all(rank["parameters"] == [8 * psi, 8 * psi] for rank in kept)
    assert sum(rank["optimizer, offloaded"][1] for rank in kept) == 2 * 8 * psi
    assert set(moved[0]) == {TO_HOST, TO_DEVICE}

    traffic = written["traffic"]
    assert traffic["not_observed"] == "threads of one process have no MPI to count their messages"
    assert np.sum(traffic["matrix"]) == sum(row["recorded"]["bytes"] for row in traffic["rows"])
    assert all(row["predicted"] == row["recorded"] for row in traffic["rows"])
    phases = {row["phase"] for row in traffic["rows"]}
    assert phases >= {"start/check", "reduce/head", "update/head", "loss"}


def test_an_asynchronous_worker_processes_a_part_of_the_batch(run: Any, tmp_path: Path) -> None:
    """Three steps of 36 bytes are as many whoever counts the losses, of which there are six."""
    file = tmp_path / "run.json"
    done = run("--strategy", "server-async", "--json", file, ranks=3)
    written = json.loads(file.read_text())
    assert len(done.losses) == 6
    assert written["tokens_per_second"] * written["seconds"] == pytest.approx(3 * 36)


def test_trace_is_one_file_with_all_calls_and_phases_of_every_rank(
    run: Any, tmp_path: Path
) -> None:
    """All bytes that were sent are in it, and each call within a phase."""
    file, traffic = tmp_path / "trace.json", tmp_path / "run.json"
    words = ["--strategy", "zero2", "--micro-batches", "2", "--trace", file, "--json", traffic]
    assert run(*words, ranks=3).status == 0
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2}
    matrix = json.loads(traffic.read_text())["traffic"]["matrix"]
    for rank in range(3):
        mine = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        calls = [event for event in mine if event["tid"] == 0]
        spans = [event for event in mine if event["tid"] == 1]
        assert sum(call["args"]["bytes"] for call in calls) == sum(matrix[rank])
        names = [span["name"] for span in spans]
        often = {"start": 1, "forward": 6, "backward": 6, "update": 3, "loss": 3}
        assert {name: names.count(name) for name in names} == often
        for call in calls:
            assert any(
                call["cat"].partition("/")[0] == span["name"]
                and span["ts"] <= call["ts"] <= span["ts"] + span["dur"]
                for span in spans
            )


# Checkpoints

RESUMED = [
    ("ddp", 2),
    ("ddp --dtype float16 --clip 1", 2),
    ("server-sync --dtype float16", 2),
    ("zero3 --optimizer adamw --tied --offload host", 3),
]


HALF = "--dtype float16"


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 losses are scaled so much that the first gradients are too large."""
    scale = partial(LossScale, initial=2.0**18)
    monkeypatch.setattr("parallel.run.arrays.LossScale", scale)


overflows = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def whole_and_resumed(run: Any, words: list[str], folder: Path, ranks: int) -> tuple[Run, Run, Run]:
    """Six steps at a stretch, saved below `folder` in "a"; four, and the last two, in "b"."""
    whole_path, path = folder / "a", folder / "b"
    whole = run(*words, "--steps", "6", "--save", whole_path, ranks=ranks)
    first = run(*words, "--steps", "4", "--save", path, ranks=ranks)
    rest = run(*words, "--steps", "6", "--save", path, "--resume", path, ranks=ranks)
    assert [whole.status, first.status, rest.status] == [0, 0, 0]
    return whole, first, rest


def check_halved(run: Run) -> None:
    """Some of its updates were skipped, and the loss scale halved as often, and some were made."""
    strategy = run.training.strategy
    assert 0 < strategy.updates.num_skipped < len(run.losses)
    assert strategy.loss_scale.value == 2.0 ** (18 - strategy.updates.num_skipped)


@overflows
@pytest.mark.usefixtures("overflowing")
@pytest.mark.parametrize(("strategy", "ranks"), RESUMED)
def test_a_resumed_run_goes_on_exactly(run: Any, tmp_path: Path, strategy: str, ranks: int) -> None:
    """Losses of steps 5 and 6, and what is saved, are to the last bit those of a run of 6."""
    words, whole_path, path = ["--strategy", *strategy.split()], tmp_path / "a", tmp_path / "b"
    whole, first, rest = whole_and_resumed(run, words, tmp_path, ranks)
    if HALF in strategy:
        check_halved(first)
    assert first.losses + rest.losses == whole.losses
    assert "from step 4" in rest.said and "continuing" not in whole.said
    assert "| load " in rest.said and "| load " not in whole.said
    assert "start/broadcast" not in rest.said  # of what is loaded
    for part in (whole_path / "step-00000006").glob("*.safetensors"):
        one, other = (load_file(root / "step-00000006" / part.name) for root in (whole_path, path))
        assert {name: x.tobytes() for name, x in one.items()} == {
            name: x.tobytes() for name, x in other.items()
        }
    one, other = (root / "step-00000006" / METADATA_FILE for root in (whole_path, path))
    assert one.read_text() == other.read_text()


@overflows
@pytest.mark.usefixtures("overflowing")
@pytest.mark.parametrize(("strategy", "ranks"), [x for x in RESUMED if HALF in x[0]])
def test_a_loss_scale_that_is_forgotten_would_be_noticed(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strategy: str, ranks: int
) -> None:
    """The negative control: updates are skipped for overflows that have been dealt with."""
    fill = Checkpoint.fill

    def forgetting(self: Checkpoint, strategy: Trainer) -> None:
        before = dict(vars(strategy.loss_scale))
        fill(self, strategy)
        vars(strategy.loss_scale).update(before)

    monkeypatch.setattr(Checkpoint, "fill", forgetting)
    words = ["--strategy", *strategy.split()]
    whole, first, rest = whole_and_resumed(run, words, tmp_path, ranks)
    check_halved(first)
    assert first.losses == whole.losses[:4] and rest.losses[0] == whole.losses[4]
    assert rest.losses[1] != whole.losses[5]


@pytest.mark.parametrize(("steps", "saved"), [(5, [2, 4, 5]), (4, [2, 4])])
def test_save_every_keeps_a_checkpoint_after_every_so_many_steps(
    run: Any, tmp_path: Path, steps: int, saved: list[int]
) -> None:
    """And one at the end, once."""
    done = run("--steps", str(steps), "--save", tmp_path, "--save-every", "2")
    names = [f"step-{step:08d}" for step in saved]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert done.status == 0  # what all of them sent is predicted
    (row,) = (line for line in done.said.splitlines() if line.startswith("| save "))
    stages = str(4 * len(saved))  # three reports, and the digests of the files
    assert [cell.strip() for cell in row.split("|")[3:5]] == [stages, stages]


def test_another_strategy_may_continue_a_run(run: Any, tmp_path: Path) -> None:
    whole = run("--steps", "6", ranks=3)
    run("--steps", "3", "--strategy", "zero3", "--save", tmp_path, ranks=4)
    rest = run("--steps", "6", "--strategy", "zero1", "--resume", tmp_path, ranks=2)
    assert rest.status == 0
    np.testing.assert_allclose(rest.losses, whole.losses[3:], rtol=1e-12)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--dtype", "float32"], "dtype: float64 in the checkpoint, but float32 in the strategy"),
        (["--hidden", "16"], "shapes: ['embedding.token', [256, 8]] in the checkpoint"),
        (["--optimizer", "sgd"], "states: first in the checkpoint, but velocity in the strategy"),
        (["--tied"], "in the checkpoint, but nothing in the strategy"),
    ],
)
def test_a_checkpoint_of_another_setup_is_refused_in_a_sentence(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    run("--steps", "2", "--save", tmp_path)
    with pytest.raises(SystemExit) as stop:
        COMMAND.main([*SMALL, "--steps", "3", "--resume", str(tmp_path), "--threads", "2", *words])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and sentence in said and said.count("python -m parallel.train") == 1


def test_a_checkpoint_that_was_cut_is_refused_in_a_sentence(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are threads do not abort the MPI of the program that they are in."""
    aborted: list[Any] = []
    monkeypatch.setattr(mpi4py.run, "set_abort_status", aborted.append)
    run("--steps", "2", "--save", tmp_path)
    (tmp_path / "step-00000002" / "rank-1-of-2.safetensors").unlink()
    with pytest.raises(SystemExit) as stop:
        COMMAND.main([*SMALL, "--steps", "3", "--resume", str(tmp_path), "--threads", "2"])
    assert stop.value.code == 2 and "rank-1-of-2" in capsys.readouterr().err
    assert aborted == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--mesh", "data=3"], "a mesh of data=3 has 3 ranks, not 2"),
        (["--mesh", "expert=2"], "no strategy trains on --mesh expert=2; this works: --mesh"),
        (["--mesh", "replicate=2"], "no strategy trains on --mesh replicate=2; this works: --mesh"),
        (["--mesh", "data=2", "--schedule", "gpipe"], "--schedule needs --mesh with pipe=N"),
        (["--sequence-parallel"], "--sequence-parallel needs --mesh with tensor=N"),
        (["--mesh", "replicate=1,shard=2", "--zero", "1"], "no strategy trains on --mesh"),
        (["--mesh", "colour=2"], "there is no axis 'colour'; choose from pipe"),
        (["--mesh", "replicate=1,shard=2", "--group-size", "1"], "--mesh takes no --group-size"),
        (["--strategy", "ddp", "--zero", "1"], "--strategy takes no --mesh and no --zero"),
    ],
)
def test_a_mesh_that_no_strategy_serves_is_refused(words: list[str], sentence: str) -> None:
    said = sentences(lambda _: words, 2)
    assert said == 2 * [said[0]] and sentence in said[0]


ADVISED: dict[tuple[str, ...], tuple[str, ...]] = {  # refused words, and those beside them
    ("--strategy", "hsdp"): ("--dropout", "0.1"),
    ("--strategy", "local-updates"): ("--dropout", "0.1"),
    ("--strategy", "server-sync"): ("--dropout", "0.1", "--bucket-bytes", "9"),
    ("--strategy", "zeropp"): ("--dropout", "0.1", "--keep-after-forward"),
    ("--strategy", "ddp", "--zero", "1"): ("--hook", "int8"),
    ("--strategy", "zero3", "--mesh", "data=2"): (),
    ("--mesh", "replicate=2"): ("--keep-after-forward",),
    ("--mesh", "replicate=1,shard=2", "--zero", "1"): ("--schedule", "gpipe"),
    ("--mesh", "replicate=1,shard=2", "--zero", "2"): ("--schedule", "pipedream"),
    ("--mesh", "shard=2"): ("--sequence-parallel",),
}


@pytest.mark.parametrize("refused", ADVISED)
@pytest.mark.slow
def test_a_mesh_that_is_advised_works(refused: tuple[str, ...]) -> None:
    """Each axis, stage and name in the sentence, in place of the words that are refused."""
    kept = ADVISED[refused]
    said = sentences(lambda _: [*refused, *kept], 2)[0]
    ways = [*advised(said)]
    assert ways and "; this works: " in said
    for way in ways:
        assert sentences(lambda _, way=way: [*kept, *way], 2) == 2 * [""], way  # type: ignore[misc]


def advised(said: str) -> Iterator[list[str]]:
    """The words that a sentence says would work, for two ranks."""
    mesh = r"--mesh with (?:any of )?(.*?) and --zero ([0-9, or]*)"
    for axes, stages in re.findall(mesh, said):
        for axis, stage in product(re.findall("[a-z]{4,}", axes), re.findall("[0-9]", stages)):
            yield ["--mesh", f"{axis}=2", "--zero", stage]
    if "replicate=G,shard=N" in said.partition("; this works: ")[2]:
        yield ["--mesh", "replicate=1,shard=2", "--zero", "3"]
    for names in re.findall("--strategy ([a-z0-9, ]+)$", said):
        yield from (["--strategy", name] for name in re.findall("[a-z0-9]{3,}", names))


def test_no_mesh_is_advised_if_none_works() -> None:
    words = ["--strategy", "zeropp", "--gradient-bits", "4", "--dropout", "0.1"]
    assert sentences(lambda _: words, 2)[0].endswith("zeropp takes no --dropout")


def test_a_mesh_and_a_stage_are_a_strategy(run: Any) -> None:
    for words, name in (
        (["--mesh", "data=4"], "ddp"),
        (["--zero", "2"], "zero2"),
        (["--mesh", "replicate=2,shard=2", "--zero", "3"], "hsdp"),
        (["--mesh", "pipe=1,data=4,tensor=1", "--zero", "1"], "zero1"),
    ):
        meshed, named = run(*words, ranks=4), run("--strategy", name, ranks=4)
        assert meshed.losses == named.losses and meshed.status == named.status == 0


def test_axes_stay_in_the_order_that_is_given(run: Any) -> None:
    done = taken(run("--mesh", "shard=2,replicate=2", ranks=4))
    assert done.mesh.ranks("shard") == [(0, 2), (1, 3)]


# Options


def taken(done: Run) -> Trainer:
    assert done.status == 0
    return done.training.strategy


def test_the_option_hook_chooses_how_gradients_are_summed(run: Any) -> None:
    plain = run()
    hooks = {
        "float16": HalfPrecision,
        "bfloat16": HalfPrecision,
        "int8": Int8Blocks,
        "powersgd:2": PowerSGD,
    }
    for word, kind in hooks.items():
        done = run("--hook", word)
        assert type(taken(done).sharding.reduction) is kind
        assert done.losses != plain.losses
        np.testing.assert_allclose(done.losses, plain.losses, rtol=2e-2)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_the_option_offload_moves_updates_and_changes_no_loss(
    run: Any, tmp_path: Path, place: str
) -> None:
    """Updates elsewhere make no difference; what they move is shown."""
    word = f"disk:{tmp_path}" if place == "disk" else place
    done = run("--strategy", "zero3", "--offload", word)
    assert done.losses == run("--strategy", "zero3").losses
    assert "master, offloaded f" in done.said and "parameters f" in done.said
    assert ("written to disk c" in done.said) == (place == "disk")
    if place == "disk":
        assert taken(done).offload.storage.moved["written to disk"] > 0


@pytest.mark.parametrize("place", ["host", "disk"])
def test_the_option_offload_activations_moves_activations_and_changes_no_loss(
    run: Any, tmp_path: Path, place: str
) -> None:
    """Activations elsewhere make no difference; what is moved is shown."""
    word = f"disk:{tmp_path}" if place == "disk" else place
    done = run("--strategy", "zero3", "--layers", "2", "--offload-activations", word)
    assert done.losses == run("--strategy", "zero3", "--layers", "2").losses
    for column in ("activations, offloaded f", "activations written to disk c"):
        assert (column in done.said) == (place == "disk")


def test_the_option_clip_bounds_the_gradient(run: Any) -> None:
    """By so much that a step is as small as one without a rate."""
    plain, clipped = (
        run("--optimizer", "sgd", "--lr", "0.5", *words).losses
        for words in ([], ["--clip", "1e-9"])
    )
    still = run("--optimizer", "sgd", "--lr", "0").losses
    np.testing.assert_allclose(clipped, still, rtol=1e-9)
    assert not np.allclose(plain, still, rtol=1e-4)


def test_the_option_recompute_keeps_less_and_changes_no_loss(run: Any) -> None:
    plain, again = run("--layers", "2"), run("--layers", "2", "--recompute")
    assert plain.losses == again.losses
    numbers = [taken(each).micro_batches.num_recomputed for each in (plain, again)]
    assert numbers == [0, 2 * 3]
    assert taken(again).memory.peak["activations"] < taken(plain).memory.peak["activations"]


def test_the_option_tied_leaves_one_table(run: Any) -> None:
    plain, tied = taken(run()).model, taken(run("--tied")).model
    assert plain.num_parameters - tied.num_parameters == 256 * 8


def test_the_option_group_size_is_the_size_of_the_axis(run: Any) -> None:
    assert taken(run("--strategy", "hsdp")).mesh.axes["shard"] == 2
    for strategy in ("hsdp", "zeropp"):
        assert taken(run("--strategy", strategy, "--group-size", "1")).mesh.axes["shard"] == 1


def test_the_option_gradient_bits_changes_what_is_sent(run: Any) -> None:
    of = {
        bits: run("--strategy", "zeropp", *words, ranks=4)
        for bits, words in ((8, []), (4, ["--gradient-bits", "4"]))
    }
    assert all(taken(done).sharding.reduction.bits == bits for bits, done in of.items())
    assert of[4].status == 0 and of[4].losses != of[8].losses


def test_the_option_keep_after_forward_gathers_less_and_changes_no_loss(run: Any) -> None:
    for strategy in ("zero3", "hsdp"):
        freed, kept = (
            run("--strategy", strategy, *words) for words in ([], ["--keep-after-forward"])
        )
        kinds = [each.kind for each in taken(kept).actions]
        assert 0 < kinds.count("UNSHARD") < [a.kind for a in taken(freed).actions].count("UNSHARD")
        assert freed.losses == kept.losses


def test_the_option_staleness_bound_holds(run: Any) -> None:
    assert taken(run("--strategy", "server-async", ranks=3)).staleness_bound is None
    bounded = taken(run("--strategy", "server-async", "--staleness-bound", "0", ranks=3))
    assert bounded.staleness_bound == 0
    assert max(each.updates for each in bounded.staleness) <= 1


def test_the_options_bucket_bytes_and_algorithm_reach_the_run(run: Any) -> None:
    ddp = taken(run("--bucket-bytes", "1", "--algorithm", "recursive_doubling"))
    assert list(ddp.view.buckets.values()) == [["head"], ["block0"], ["embedding"]]
    assert ddp.layout.algorithm == "recursive_doubling"


def test_ranks_may_be_threads_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMAND.main([*SMALL, "--threads", "2"]) == 0
    said = capsys.readouterr().out
    assert "ddp, ranks 2," in said and "predicted = recorded, to the byte" in said


def test_the_first_line_names_the_axes_in_the_order_of_the_mesh(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--mesh", "tensor=2,pipe=2", "--schedule", "gpipe", "--zero", "1"]
    assert COMMAND.main([*SMALL, *words, "--layers", "2", "--heads", "2", "--threads", "4"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("zero1 on data=1,tensor=2,pipe=2 by gpipe, ranks 4,")


def test_options_have_their_defaults(run: Any) -> None:
    ddp = taken(run())
    assert ddp.sharding.config() == Sharding.ddp().config()
    assert (ddp.layout.algorithm, ddp.recipe.num_micro_batches) == ("ring", 1)
    assert taken(run("--strategy", "server-sync")).layout.algorithm == "linear"


# Algorithms


@pytest.mark.parametrize(
    ("strategy", "algorithm"),
    [("server-sync", "binomial"), ("zero1", "direct"), ("hsdp", "circulant"), ("zeropp", "bruck")],
)
def test_traffic_of_another_algorithm_is_predicted(run: Any, strategy: str, algorithm: str) -> None:
    assert (
        taken(run("--strategy", strategy, "--algorithm", algorithm)).layout.algorithm == algorithm
    )


# Refusals

REFUSED: dict[str, tuple[list[str], int, str]] = {
    "rows": (["--batch", "2"], 3, "a global batch of 2 cannot be divided among 3 ranks with 1 m"),
    "micro-batches": (
        ["--micro-batches", "5"],
        2,
        "a global batch of 9 cannot be divided among 2 ranks with 5 micro-batches each",
    ),
    "serial": (["--strategy", "serial"], 2, "the serial strategy runs on one rank, not on 2"),
    "elastic": (["--strategy", "elastic"], 2, "needs an Open MPI that was started with fault tol"),
    "no text": (["--text", "/no/such/text"], 1, "no text in /no/such/text"),
    "context": (["--context", "1000000"], 2, "too short for a context of 1000000"),
    "heads": (["--heads", "3"], 2, "3 heads do not divide a width of 8"),
    "hook of zero1": (
        ["--strategy", "zero1", "--hook", "int8"],
        2,
        "the strategy zero1 takes no --hook",
    ),
    "several": (
        ["--staleness-bound", "1", "--keep-after-forward"],
        2,
        "the strategy ddp takes no --keep-after-forward, --staleness-bound",
    ),
    "kill": (["--kill", "1:1"], 2, "the strategy ddp takes no --kill"),
    "hook": (["--hook", "int4"], 2, "there is no hook 'int4'; choose float16, bfloat16, int8"),
    "hook's rank": (["--hook", "powersgd:x"], 2, "there is no hook 'powersgd:x'"),
    "hook's rank 0": (["--hook", "powersgd:0"], 2, "the rank of an approximation is 0"),
    "place": (["--offload", "moon"], 2, "cannot offload to 'moon'; choose host or disk:F"),
    "folder": (["--offload", "disk:"], 2, "cannot offload to 'disk:'"),
    "place of activations": (
        ["--offload-activations", "moon"],
        2,
        "cannot offload to 'moon'; choose host or disk:F",
    ),
    "algorithm": (["--algorithm", "rang"], 2, "unknown algorithm 'rang' for all_reduce; known"),
    "algorithm's ranks": (["--algorithm", "swing"], 3, "all_reduce by swing serves an even number"),
    "algorithm of both": (
        ["--strategy", "zero2", "--algorithm", "bruck"],
        2,
        "unknown algorithm 'bruck' for reduce_scatter",
    ),
    "algorithm of the servers": (
        ["--strategy", "server-sync", "--algorithm", "scatter_all_gather"],
        2,
        "unknown algorithm 'scatter_all_gather' for reduce",
    ),
    "algorithm of groups": (
        ["--strategy", "hsdp", "--algorithm", "swing", "--group-size", "4"],
        4,
        "all_reduce by swing serves an even number of ranks only, not 1",
    ),
    "algorithm by which ranks differ": (
        ["--algorithm", "one_shot"],
        3,
        "all_reduce.one_shot rounds differently on different ranks",
    ),
    "algorithm of nothing": (
        ["--strategy", "serial", "--algorithm", "ring"],
        1,
        "the strategy serial takes no --algorithm",
    ),
    "group": (
        ["--strategy", "hsdp", "--group-size", "2"],
        3,
        "3 ranks cannot be divided into groups of 2",
    ),
    "save": (["--save-every", "1"], 2, "--save-every needs --save"),
    "save, asynchronous": (
        ["--strategy", "server-async", "--save", "x", "--save-every", "1"],
        2,
        "server-async takes no --save-every",
    ),
    "save, local": (
        ["--strategy", "local-updates", "--save", "x", "--save-every", "5"],
        2,
        "--save-every 5 is no multiple of --every 10: between, ranks have different parameters",
    ),
    "save, elastic": (
        ["--strategy", "elastic", "--save", "x"],
        2,
        "the elastic strategy takes no --save",
    ),
    "trace": (["--trace", "/no/such/folder/x.json"], 2, "/no/such/folder/x.json cannot be written"),
    "json": (["--json", "/"], 2, "/ cannot be written"),
    "no checkpoint": (["--resume", "/no/such/checkpoint"], 2, "no checkpoint in /no/such/checkp"),
}


Words = Callable[[int], Sequence[str | Path]]


def sentences(words: Words, ranks: int) -> list[str]:
    """What each rank raises; the words of each are its own."""

    def fn(comm: Communicator) -> str:
        try:
            training_of(comm, *words(comm.rank)).run()
        except ValueError as error:
            return str(error)
        return ""

    return list(collectives.run(fn, size=ranks))


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_on_all_ranks(what: str) -> None:
    words, ranks, sentence = REFUSED[what]
    said = sentences(lambda _: words, ranks)
    assert said == ranks * [said[0]]
    assert sentence in said[0]


def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it could not be imported
    with pytest.raises(SystemExit) as stop:
        COMMAND.main([*SMALL, "--threads", "2", "--device", "cuda"])
    assert stop.value.code == 2
    assert (
        "--device cuda: this rank can use no GPU: CuPy is not installed" in capsys.readouterr().err
    )


def test_what_one_rank_alone_cannot_do_is_refused_on_all() -> None:
    said = sentences(lambda rank: ["--text", "/no/such/text"] if rank == 1 else [], 3)
    assert said == 3 * [said[0]]
    assert "failed: rank 1: there is no text in /no/such/text" in said[0]


@pytest.mark.parametrize(("option", "value"), [("lr", "0.1"), ("seed", "1"), ("text", __file__)])
def test_ranks_that_are_told_different_things_are_refused(option: str, value: str) -> None:
    said = sentences(lambda rank: [f"--{option}", value] if rank == 2 else [], 3)
    assert said == 3 * [said[0]]
    assert f"{option} of rank 2" in said[0]


@pytest.mark.parametrize("strategy", ["zero2", "hsdp", "zeropp"])
def test_a_rank_that_cannot_prepare_stops_the_others(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they would divide into groups first, and wait for it."""

    def device_namespace(device: str, comm: Communicator) -> Any:
        if comm.rank == 1:
            raise ImportError("no GPU here")

    monkeypatch.setattr(presets, "device_namespace", device_namespace)
    assert sentences(lambda _: ["--strategy", strategy], 4) == 4 * [
        "preparing the strategy failed: rank 1: no GPU here"
    ]


def test_a_failure_without_words_in_utf_8_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "device_namespace", Mock(side_effect=OSError("folder \udcff")))
    assert sentences(lambda _: [], 2) == 2 * ["preparing the strategy failed: ranks 0, 1: folder ?"]


@pytest.mark.parametrize("words", [["--steps", "3"], ["--steps", "4", "--save-every", "3"]])
def test_a_checkpoint_that_is_there_is_not_made_again(
    run: Any, tmp_path: Path, words: list[str]
) -> None:
    """Said before the first step, not after the last."""
    run("--save", tmp_path)
    (said, _) = sentences(lambda _: ["--save", tmp_path, *words], 2)
    there = tmp_path / "step-00000003"
    assert said.endswith(f"cannot save a checkpoint in {there}: there is one already")


def test_a_run_that_is_over_cannot_be_resumed(run: Any, tmp_path: Path) -> None:
    run("--save", tmp_path)
    said = sentences(lambda _: ["--resume", tmp_path], 2)
    assert said == 2 * [said[0]]
    assert f"{tmp_path / 'step-00000003'} is after step 3: --steps must be more" in said[0]


UNDERSTOOD = [["--steps", "0"], ["--batch", "x"], ["--strategy", "other"], ["--kill", "2"]]


@pytest.mark.parametrize("words", UNDERSTOOD, ids=" ".join)
def test_arguments_that_are_not_understood_have_status_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        COMMAND.parser().parse_args(words)
    assert end.value.code == 2
    assert f"argument {words[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--moe", "switch"], ["--experts", "4", "--moe=switch"]])
def test_who_asks_for_experts_is_told_which_command_has_them(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        COMMAND.main([*SMALL, *words])
    sentence = "mixtures of experts are trained by ring moe train"
    assert end.value.code == 2
    assert capsys.readouterr().err == f"python -m parallel.train: {sentence}\n"
    with pytest.raises(SystemExit) as end:  # another option that it does not have
        COMMAND.main([*SMALL, "--experts", "4"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "--experts 4" in said and sentence not in said


# As a program


def statuses(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[Any]:
    """What `main` returns, or exits with, on each of two ranks."""
    world = threading.local()

    def fn(comm: Communicator) -> Any:
        world.comm = comm
        try:
            return COMMAND.main([*SMALL, *words])
        except SystemExit as end:
            return end.code

    monkeypatch.setattr(collectives, "world", lambda: world.comm)
    return list(collectives.run(fn, size=2))


def test_the_status_of_the_command_is_0_1_or_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first rank's tells, and it alone speaks."""
    assert statuses(monkeypatch) == [0, 0]
    assert capsys.readouterr().out.count("predicted = recorded") == 1
    assert statuses(monkeypatch, "--heads", "3") == [2, 2]
    said = "python -m parallel.train: 3 heads do not divide a width of 8\n"
    assert capsys.readouterr().err == said
    more_memory(monkeypatch)
    assert statuses(monkeypatch) == [1, 0]


# GPUs


@pytest.mark.parametrize(
    ("words", "has_counters", "devices"),
    [
        (["--device", "cuda"], True, ["auto", "staged"]),
        (["--device", "cuda", "--no-monitor"], True, ["auto"]),
        (["--device", "cuda"], False, ["auto"]),
        (["--device", "cpu"], True, ["auto"]),
    ],
)
def test_messages_of_gpus_are_staged_if_mpi_counts_them(
    words: Sequence[str],
    has_counters: bool,
    devices: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """MPI sees nothing of what ranks read from each other's GPUs.  The program says so."""
    asked = []

    def world(*, device: str = "auto") -> Any:
        asked.append(device)
        return Mock(Communicator, rank=0)

    monkeypatch.setattr(collectives, "world", world)
    monkeypatch.setattr(ranks, "has_counters", lambda comm: has_counters)
    ranks.training_world(COMMAND.parser().parse_args([*SMALL, "--progress", "none", *words]))
    assert asked == devices
    assert ("Messages are staged in host memory" in capsys.readouterr().out) == (len(devices) > 1)


def test_threads_have_no_counters() -> None:
    assert collectives.run(ranks.has_counters, size=2) == [False, False]
