"""Activations in host memory and on disk: the same bits, and what is kept and moved is known."""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from array_api_compat import numpy as host

import collectives
from collectives import Communicator
from parallel import Disk, HostMemory, MemoryTracker, Recipe, Trainer, gpt
from parallel.commands.models import RECOMPUTE
from parallel.commands.rank_report import RankReport
from parallel.nn import (
    Activations,
    ArraySpec,
    CrossEntropy,
    Embedding,
    Layer,
    Linear,
    Model,
    Unembedding,
)
from parallel.optim.storage import OFFLOADED, READ, TO_DEVICE, TO_HOST, WRITTEN, Storage
from parallel.step.kept import activations_of, tokens_of
from tests.fakes.arrays import FAKE, bare, crossed
from tests.parallel.optim.test_offload import (
    CONTEXT,
    ROWS,
    STEPS,
    Make,
    batch,
    bits,
    places,
    serial,
)
from tests.parallel.predict.test_memory import numpys
from tests.parallel.training import ddp, zero3


def trained(
    make: Make, comm: Communicator | None, recompute: str = "none", **recipe: Any
) -> tuple[Trainer, list[float]]:
    """A strategy that has done its steps, and their losses."""
    model = gpt(
        num_layers=2, hidden=6, num_heads=2, context=CONTEXT, recompute=RECOMPUTE[recompute]
    )
    return run(make(comm, model, Recipe(num_micro_batches=2, **recipe)))


def run(strategy: Trainer) -> tuple[Trainer, list[float]]:
    strategy.start()
    return strategy, strategy.train(STEPS, batch, ROWS * CONTEXT, lambda *done: None)


def report_of(strategy: Trainer) -> RankReport:
    rows = len(batch(0, *strategy.batch_part)[0])
    return RankReport.of(strategy, STEPS - strategy.updates.num_skipped, rows, CONTEXT)


def check_predictions(strategy: Trainer) -> None:
    """What is kept and what was moved are what the formulas say."""
    report = report_of(strategy)
    for name, (predicted, counted) in (report.memory | report.moved).items():
        assert predicted == counted, name


def saved_by_layer(strategy: Trainer) -> list[list[Activations]]:
    """By micro-batch."""
    rows = len(batch(0, *strategy.batch_part)[0])
    tokens = tokens_of(strategy.view, rows, CONTEXT)
    return [list(part.values()) for part in activations_of(strategy.view, tokens)]


# The same bits, and predictions


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("xp", [host, FAKE], ids=["host", "device"])
def test_every_place_gives_the_same_bits(
    xp: Any, dtype: str, recompute: str, tmp_path: Path
) -> None:
    found = []
    for place in places(tmp_path):
        strategy, losses = trained(
            serial, None, recompute, dtype=dtype, xp=xp, offload_activations=place
        )
        check_predictions(strategy)
        found.append(bits(strategy, losses))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("xp", [host, FAKE], ids=["host", "device"])
@pytest.mark.parametrize(("make", "size"), [(ddp, 3), (zero3, 3)])
def test_every_place_gives_the_same_bits_on_several_ranks(
    make: Make, size: int, xp: Any, tmp_path: Path
) -> None:
    def runs(comm: Communicator) -> None:
        found = []
        for place in places(tmp_path):
            strategy, losses = trained(make, comm, xp=xp, offload_activations=place)
            check_predictions(strategy)
            found.append(bits(strategy, losses))
        assert found[0] == found[1] == found[2]

    collectives.run(runs, size=size)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_one_layer_at_a_time_is_on_the_device(recompute: str, tmp_path: Path) -> None:
    """And what all layers save is elsewhere, when the last of them has run."""
    for place in places(tmp_path)[1:]:
        strategy, _ = trained(serial, None, recompute, xp=FAKE, offload_activations=place)
        parts = saved_by_layer(strategy)
        largest = max(each.saved + each.extra for part in parts for each in part)
        assert strategy.memory.peak["activations"] == largest
        assert strategy.memory.peak[OFFLOADED] == max(
            sum(each.saved for each in part) for part in parts
        )
        assert strategy.memory.now["activations"] == strategy.memory.now[OFFLOADED] == 0


def test_nothing_moves_from_host_memory_to_host_memory() -> None:
    kept, offloaded = (
        trained(serial, None, offload_activations=place)[0] for place in (Storage, HostMemory)
    )
    assert kept.memory.peak == offloaded.memory.peak
    assert not kept.activations.moved and not offloaded.activations.moved
    assert report_of(offloaded).moved == {}


def test_all_that_crosses_is_counted(tmp_path: Path) -> None:
    """Beside the parameters at the beginning, and the tokens of each step."""
    for place in places(tmp_path)[1:]:
        crossed().clear()
        strategy, _ = trained(serial, None, xp=FAKE, offload_activations=place)
        ways, moved = Counter(crossed()), strategy.activations.moved
        saved = STEPS * sum(each.saved for part in saved_by_layer(strategy) for each in part)
        assert moved == dict.fromkeys(strategy.activations.columns, saved)
        assert (ways["get"], ways["set"]) == (moved[TO_HOST], moved[TO_DEVICE])
        assert ways["asarray"] == strategy.memory.peak["parameters"] + STEPS * sum(
            x.nbytes for x in batch(0, 0, 1)
        )


class Forgets(HostMemory):
    """Counts what it brings to the host, and keeps it on the device too."""

    def put(self, saved: Any) -> Any:
        self.hoard = [*getattr(self, "hoard", []), saved]
        return super().put(saved)


def test_what_stays_on_the_device_is_noticed() -> None:
    strategy, _ = trained(serial, None, xp=FAKE, offload_activations=Forgets)
    predicted, counted = report_of(strategy).memory["activations"]
    assert counted > predicted


def test_a_skipped_update_moves_as_much() -> None:
    strategy, _ = trained(serial, None, dtype="float16", xp=FAKE, offload_activations=HostMemory)
    strategy.loss_scale.value = 2.0**40
    strategy.step(*batch(0, 0, 1), ROWS * CONTEXT)
    assert (strategy.updates.num_skipped, strategy.num_batches) == (1, STEPS + 1)
    check_predictions(strategy)


# What layers save


class Two(NamedTuple):
    """What a layer may save."""

    x: Any
    rest: Any


@pytest.mark.parametrize("xp", [host, FAKE], ids=["host", "device"])
def test_arrays_come_back_and_what_is_no_array_stays(xp: Any, tmp_path: Path) -> None:
    """In tuples, lists and dicts; of any dtype and shape; each once, and views as arrays."""
    x = xp.asarray(np.arange(12.0).reshape(3, 4))
    half = xp.asarray(np.ones(3, ml_dtypes.bfloat16))
    tokens, thing = xp.asarray(np.arange(3)), object()
    empty, one = xp.zeros((0, 3), dtype=np.float32), xp.asarray(np.array(2.5))
    saved = Two([x, {"a": (x, x[1:, :2], half)}], (thing, None, tokens, empty, one, 3))
    offload = Disk(tmp_path, 0, xp)
    kept = offload.put(saved)
    assert not any(bare(x) is bare(each) for each in kept.x)
    back = offload.take(kept)
    again = back.x[0]
    assert again is not x and again is back.x[1]["a"][0]
    view, same_half = back.x[1]["a"][1:]
    for copy, array in ((again, x), (view, x[1:, :2]), (same_half, half)):
        assert type(copy) is type(x) and copy.dtype == array.dtype
        np.testing.assert_array_equal(bare(copy), bare(array))
    assert back.rest[0] is thing and back.rest[1] is None and back.rest[2] is tokens
    assert back.rest[3].shape == (0, 3) and float(back.rest[4]) == 2.5 and back.rest[5] == 3
    nbytes = 8 * 12 + 8 * 4 + 2 * 3 + 8
    assert offload.moved == dict.fromkeys(offload.columns, nbytes)
    assert offload.columns == ((TO_HOST, TO_DEVICE) if xp is FAKE else ()) + (READ, WRITTEN)


@pytest.mark.parametrize("xp", [host, FAKE], ids=["host", "device"])
def test_an_array_in_several_shapes_is_moved_once(xp: Any, tmp_path: Path) -> None:
    """And comes back in each of them, in one memory; but not what has another order."""
    x = xp.asarray(np.arange(24.0).reshape(2, 3, 4))
    saved = [x, x.reshape(6, 4), x.reshape(-1), x.reshape(6, 4).T]
    offload = Disk(tmp_path, 0, xp)
    memory = MemoryTracker()
    kept = memory.track(OFFLOADED, offload.put(saved))
    assert len(list(offload.folder.iterdir())) == 2
    back = offload.take(kept)
    for copy, array in zip(back, saved, strict=True):
        np.testing.assert_array_equal(bare(copy), bare(array), strict=True)
    assert np.shares_memory(bare(back[0]), bare(back[1]))
    assert np.shares_memory(bare(back[0]), bare(back[2]))
    assert memory.now[OFFLOADED] == 2 * 8 * 24
    assert offload.moved == dict.fromkeys(offload.columns, 2 * 8 * 24)


class Through(Layer):
    """Saves its input and passes it on."""

    def forward(self, x: Any, step: Any) -> tuple[Any, Any]:
        return x, x

    def backward_input(self, dy: Any, saved: Any) -> tuple[Any, Any]:
        return dy * saved / saved, None

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return Activations(x.nbytes, x)


@pytest.mark.parametrize("xp", [host, FAKE], ids=["host", "device"])
def test_an_array_that_two_layers_save_is_moved_for_each(xp: Any, tmp_path: Path) -> None:
    """It comes back for the one and, later, for the other."""

    def model() -> Model:
        return Model(
            {
                "in": Embedding(256, CONTEXT, 4),
                "a": Linear(4, 4),
                "first": Through(),
                "second": Through(),
                "b": Linear(4, 4),
                "out": Unembedding(4, 256),
                "loss": CrossEntropy(),
            }
        )

    found = []
    for place in places(tmp_path):
        strategy = Trainer(None, model(), Recipe(xp=xp, offload_activations=place))
        found.append(bits(*run(strategy)))
    assert found[0] == found[1] == found[2]
    written = STEPS * 8 * ROWS * CONTEXT * (5 * 4 + 256)
    assert strategy.activations.moved[WRITTEN] == strategy.activations.moved[READ] == written


# Files


def test_a_file_is_removed_when_it_is_not_needed(tmp_path: Path) -> None:
    offload, memory = Disk(tmp_path, 5, host), MemoryTracker()
    assert offload.folder.parent == tmp_path and offload.folder.name.startswith("rank5-")
    kept = [offload.put([np.ones(4), np.ones(3)]), offload.put(np.ones(2))]
    memory.track(OFFLOADED, kept)
    assert sorted(x.stat().st_size for x in offload.folder.iterdir()) == [16, 24, 32]
    assert memory.now == {OFFLOADED: 72}
    offload.take(kept.pop())
    assert sorted(x.stat().st_size for x in offload.folder.iterdir()) == [24, 32]
    kept.clear()  # of a step that failed
    assert not list(offload.folder.iterdir()) and memory.now == {OFFLOADED: 0}


def test_files_are_there_between_forward_and_backward_only(tmp_path: Path) -> None:
    strategy, _ = trained(serial, None, offload_activations=partial(Disk, tmp_path))
    (folder,) = tmp_path.iterdir()
    strategy.begin(*batch(0, 0, 1), ROWS * CONTEXT)
    seen = []
    for action in strategy.actions:
        strategy.run([action])
        seen.append(sum(x.stat().st_size for x in folder.iterdir()))
    assert max(seen) == strategy.memory.peak[OFFLOADED] and seen[-1] == 0


def test_the_memory_is_free_between_forward_and_backward(tmp_path: Path) -> None:
    """To the byte, of NumPy's arrays: what is there after the last forward was there before."""
    strategy, _ = trained(serial, None, offload_activations=partial(Disk, tmp_path))
    strategy.begin(*batch(0, 0, 1), ROWS * CONTEXT)
    tracemalloc.start()
    for action in strategy.actions[: len(strategy.model.layers)]:
        strategy.run([action])
    alive = numpys()
    tracemalloc.stop()
    assert {x.kind for x in strategy.actions[: len(strategy.model.layers)]} == {"F"}
    assert strategy.memory.now[OFFLOADED] > alive == 0


def test_the_directory_is_removed_when_python_ends(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np\n"
        "from parallel import Disk\n"
        "offload = Disk(sys.argv[1], 0, np)\n"
        "kept = offload.put(np.ones(3))\n"
        "print(len(list(offload.folder.iterdir())))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert not list(tmp_path.iterdir())


def test_the_directory_is_removed_by_close(tmp_path: Path) -> None:
    offload = Disk(tmp_path / "new", 0, host)
    kept = offload.put(np.ones(4))
    offload.close()
    offload.close()
    assert not list((tmp_path / "new").iterdir())
    del kept


def test_the_directory_is_removed_with_the_strategy(tmp_path: Path) -> None:
    strategy, _ = trained(serial, None, offload_activations=partial(Disk, tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    del strategy
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        Disk(tmp_path / "file", 0, host)
