"""Updates in host memory and on disk: the same bits, and every byte that crosses accounted for."""

from __future__ import annotations

import gc
import mmap
import operator
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_api_compat import numpy as host

import collectives
from collectives import Communicator
from parallel import Adam, MemoryTracker, Recipe, Trainer, gpt, text
from parallel.accounts import CATEGORIES
from parallel.nn import Array, Model
from parallel.optim import Offload, dtype_of
from parallel.optim.formulas import bytes_moved
from parallel.optim.storage import READ, TO_DEVICE, TO_HOST, WRITTEN, Disk, HostMemory, Storage
from parallel.run.memory import offload_traffic, peak_memory, peak_offloaded_memory
from tests.fakes.arrays import FAKE, FakeArray, bare, crossed
from tests.parallel.training import ddp, zero1, zero2, zero3

CONTEXT, ROWS, STEPS = 3, 7, 2
TEXT = np.arange(256, dtype=np.uint8)

Make = Callable[[Any, Model, Recipe], Trainer]


def serial(comm: Communicator | None, model: Model, recipe: Recipe) -> Trainer:
    return Trainer(None, model, recipe)


def batch(step: int, rank: int, ranks: int) -> tuple[text.Tokens, text.Tokens]:
    return text.batch(
        TEXT, seed=0, step=step, batch_size=ROWS, context=CONTEXT, rank=rank, num_ranks=ranks
    )


def trained(make: Make, comm: Communicator | None, **recipe: Any) -> tuple[Trainer, list[float]]:
    """A strategy that has done its steps, and their losses."""
    model = gpt(num_layers=1, hidden=6, num_heads=2, context=CONTEXT)
    strategy = make(comm, model, Recipe(num_micro_batches=2, clip=0.5, **recipe))
    strategy.start()
    return strategy, strategy.train(STEPS, batch, ROWS * CONTEXT, lambda *done: None)


def bits(strategy: Trainer, losses: list[float]) -> list[bytes]:
    """Of the losses, the parameters, and what the optimizer keeps."""
    arrays = [*strategy.parameters.values(), *strategy.optimizer.arrays()]
    return [np.array(losses).tobytes(), *(bare(x).tobytes() for x in arrays)]


def check_predictions(strategy: Trainer) -> None:
    """What is kept here and there, and what was moved, are what the formulas say."""
    there, rows = strategy.offload.memory.peak, len(batch(0, *strategy.batch_part)[0])
    here = {category: strategy.memory.peak[category] for category in CATEGORIES}
    assert here == peak_memory(strategy, rows, CONTEXT)
    assert peak_offloaded_memory(strategy) == {x: there[x] for x in peak_offloaded_memory(strategy)}
    updates = strategy.num_updates_in(STEPS) - strategy.updates.num_skipped
    assert Counter(offload_traffic(strategy, updates)) == strategy.offload.storage.moved


@pytest.mark.parametrize("mix", [operator.add, operator.matmul, np.add, np.dot])
def test_the_fake_device_does_not_mix_with_the_host(mix: Any) -> None:
    """Else the tests below would show nothing."""
    here, there = np.ones(3), FakeArray(np.ones(3))
    for pair in ((here, there), (there, here)):
        with pytest.raises(TypeError):
            mix(*pair)
    for way in (np.asarray, lambda x: here.__setitem__(slice(None), x)):
        with pytest.raises(TypeError):
            way(there)
    with pytest.raises(TypeError):
        there[...] = here


# The same bits


def places(folder: Path) -> list[Any]:
    return [Storage, HostMemory, partial(Disk, folder)]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float64", 1),
        ("float64", 3),
        ("float32", 3),
        ("float16", 1),
        ("float16", 3),
        ("bfloat16", 3),
    ],
)
@pytest.mark.parametrize("make", [ddp, zero1, zero2, zero3])
@pytest.mark.slow
def test_every_offload_gives_the_same_bits(
    make: Make, dtype: str, size: int, tmp_path: Path
) -> None:
    """And keeps and moves what is predicted; nothing between device and host, which are one."""

    def run(comm: Communicator, offload: Any) -> list[bytes]:
        strategy, losses = trained(make, comm, dtype=dtype, offload=offload)
        check_predictions(strategy)
        assert (
            strategy.offload.storage.moved[TO_HOST]
            == strategy.offload.storage.moved[TO_DEVICE]
            == 0
        )
        return bits(strategy, losses)

    def runs(comm: Communicator) -> list[list[bytes]]:
        return [run(comm, offload) for offload in places(tmp_path)]

    for on_device, in_host_memory, on_disk in collectives.run(runs, size=size):
        assert on_device == in_host_memory == on_disk


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("make", "size"), [(serial, 1), (ddp, 3), (zero1, 3), (zero2, 3), (zero3, 3)]
)
@pytest.mark.slow
def test_all_that_crosses_is_counted(make: Make, size: int, dtype: str, tmp_path: Path) -> None:
    """A device's arrays: training is as on the host, and nothing else goes to and fro.

    But the parameters that a rank begins with, the tokens of each step, and, where all of the
    parameters are to be the same on all ranks, these once for their digest.
    """

    def check(comm: Communicator) -> None:
        reference = bits(*trained(make, comm, dtype=dtype))
        for offload in places(tmp_path):
            crossed().clear()
            strategy, losses = trained(make, comm, dtype=dtype, xp=FAKE, offload=offload)
            check_predictions(strategy)
            assert strategy.offload.storage.is_cross_device is (offload is not Storage)
            assert bits(strategy, losses) == reference
            tokens = STEPS * sum(x.nbytes for x in batch(0, *strategy.batch_part))
            given = strategy.memory.peak["parameters"] + tokens
            moved = strategy.offload.storage.moved
            is_looked_at = make in (zero1, zero2)
            looked_at = is_looked_at * strategy.memory.peak["parameters"]
            ways = {"get": moved[TO_HOST] + looked_at, "set": moved[TO_DEVICE], "asarray": given}
            assert crossed() == Counter(ways)

    collectives.run(check, size=size)


class FetchesTwice(HostMemory):
    """Counts half of what it moves."""

    def copy_here(self, x: Array, buffer: Array | None = None) -> Array:
        x.get(out=np.empty(x.shape, x.dtype))
        return super().copy_here(x, buffer)


class ForgetsToCopyBack(HostMemory):
    """Leaves the parameters as they are."""

    def copy_back(self, kept: Array, x: Array, buffer: Array | None = None) -> None:
        pass


def test_an_offload_that_does_not_tell_is_noticed() -> None:
    crossed().clear()
    strategy, _ = trained(serial, None, dtype="float16", xp=FAKE, offload=FetchesTwice)
    assert crossed()["get"] == 2 * strategy.offload.storage.moved[TO_HOST] > 0


def test_parameters_that_are_not_sent_back_are_noticed() -> None:
    right = bits(*trained(serial, None, dtype="float16"))
    assert bits(*trained(serial, None, dtype="float16", offload=ForgetsToCopyBack)) != right


# What is kept, and moved


def test_masters_elsewhere_are_copies_and_on_the_device_only_of_another_dtype(
    tmp_path: Path,
) -> None:
    def is_kept_twice(offload: Any, dtype: str) -> bool:
        strategy, _ = trained(serial, None, dtype=dtype, offload=offload)
        shards, masters = strategy.arrays.parameter_shards, strategy.masters
        assert np.shares_memory(shards["block0"], masters["block0"]) is (masters is shards)
        assert sum(strategy.offload.memory.peak[x] for x in ("master", "optimizer")) > 0
        return masters is not shards

    for dtype in ("float64", "float32", "float16"):
        kept = [is_kept_twice(offload, dtype) for offload in places(tmp_path)]
        assert kept == [dtype == "float16", True, True]


@pytest.mark.parametrize(
    ("dtype", "update", "load"),
    [("float16", (2, 2, 12, 12), (2, 0, 0, 4)), ("float64", (8, 8, 24, 24), (8, 0, 0, 8))],
)
def test_the_bytes_moved_for_each_element_are_those_of_zero_offload(
    dtype: str, update: Any, load: Any
) -> None:
    """ZeRO-Offload's numbers: 2 Psi/N each way in float16, of which 12 Psi/N are kept there."""
    columns = TO_HOST, TO_DEVICE, READ, WRITTEN
    assert bytes_moved(10, dtype_of(dtype)) == {
        x: 10 * n for x, n in zip(columns, update, strict=True)
    }
    assert bytes_moved(10, dtype_of(dtype), num_updates=0, num_loads=1) == {
        x: 10 * n for x, n in zip(columns, load, strict=True)
    }


def test_one_buffer_holds_what_comes_and_goes() -> None:
    """As large as the largest part of a unit that the rank updates, whatever the others are."""

    def found(comm: Communicator) -> tuple[int, int]:
        strategy, _ = trained(zero2, comm, dtype="float16", xp=FAKE, offload=HostMemory)
        parts = [x.shape[0] for x in strategy.arrays.parameter_shards.values()]
        assert min(parts) < max(parts)
        return strategy.offload.memory.peak["buffers"], 2 * max(parts)

    assert all(kept == largest for kept, largest in collectives.run(found, size=3))


def test_a_skipped_update_moves_nothing(tmp_path: Path) -> None:
    model = gpt(num_layers=1, hidden=6, num_heads=2, context=CONTEXT)
    recipe = Recipe("float16", offload=partial(Disk, tmp_path), xp=FAKE)
    strategy = Trainer(None, model, recipe)
    before = Counter(strategy.offload.storage.moved)
    strategy.loss_scale.value = 2.0**40
    strategy.step(*batch(0, 0, 1), ROWS * CONTEXT)
    assert (strategy.updates.num_skipped, strategy.updates.num_updates) == (1, 0)
    assert strategy.offload.storage.moved == before == Counter(offload_traffic(strategy, 0))
    assert all(before[x] < n for x, n in offload_traffic(strategy, 1).items())


@pytest.mark.parametrize("xp", [host, FAKE])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_unit_without_a_gradient_is_left_alone_and_not_moved(
    xp: Any, dtype: str, tmp_path: Path
) -> None:
    here = dtype_of(dtype)
    for make in places(tmp_path):
        place, owned = make(0, xp), {unit: xp.zeros(4, dtype=here) for unit in "ab"}
        offload = Offload(place, owned, MemoryTracker())
        optimizer = Adam(offload.masters, make_state=offload.zeros)
        before = Counter(place.moved)
        offload.update(optimizer, {"b": xp.ones(4, dtype=here)}, 1.0)
        assert not bare(owned["a"]).any() and bare(owned["b"]).all()
        gone, one = place.moved - before, Counter(bytes_moved(4, here))
        assert gone == Counter({x: one[x] for x in place.COLUMNS if xp is FAKE or "disk" in x})


def test_parameters_that_somebody_else_has_changed_are_loaded(tmp_path: Path) -> None:
    for make, xp in [(p, xp) for p in places(tmp_path) for xp in (host, FAKE)]:
        owned = {"a": xp.zeros(4, dtype=np.dtype(np.float16))}
        offload = Offload(make(0, xp), owned, MemoryTracker())
        owned["a"] += 3
        assert not bare(offload.masters["a"]).any()
        offload.load()
        assert (bare(offload.masters["a"]) == 3).all()


# On disk


def on_disk(
    folder: Path, sizes: dict[str, int], kind: type[Disk] = Disk
) -> tuple[Disk, Offload, Adam]:
    """A place, an offload with units of these sizes in float32, and an optimizer."""
    owned = {unit: np.zeros(size, np.float32) for unit, size in sizes.items()}
    offload = Offload(place := kind(folder, 5, host), owned, MemoryTracker())
    return place, offload, Adam(offload.masters, make_state=offload.zeros)


def update(offload: Offload, optimizer: Adam) -> None:
    offload.update(optimizer, {unit: x + 1 for unit, x in offload.parameters.items()}, 1.0)


def test_each_unit_and_state_has_a_file_of_its_own(tmp_path: Path) -> None:
    """With what is in memory, and with nothing for a unit of which the rank updates nothing."""
    place, offload, optimizer = on_disk(
        tmp_path / "new" / "folder", {"a": 7, "b/../c": 5, "none": 0}
    )
    update(offload, optimizer)
    assert place.folder.parent == tmp_path / "new" / "folder"
    assert place.folder.name.startswith("rank5-")
    kept = [offload.masters, *optimizer.states.values()]
    for kind, arrays in zip(("master", "state1", "state2"), kept, strict=True):
        for unit, name in (("a", "a"), ("b/../c", "b%2F..%2Fc")):
            on_file = np.fromfile(place.folder / f"{name}.{kind}", np.float32)
            assert on_file.all() and np.array_equal(on_file, arrays[unit])
    assert len(list(place.folder.iterdir())) == 6


def test_files_are_removed_by_close_and_training_can_go_on(tmp_path: Path) -> None:
    place, offload, optimizer = on_disk(tmp_path, {"a": 7})
    update(offload, optimizer)
    (tmp_path / "of somebody else").touch()
    place.close()
    place.close()
    assert [x.name for x in tmp_path.iterdir()] == ["of somebody else"]
    before = offload.parameters["a"].copy()
    update(offload, optimizer)
    assert (offload.parameters["a"] != before).all()


def test_files_are_removed_with_the_strategy(tmp_path: Path) -> None:
    strategy, _ = trained(serial, None, offload=partial(Disk, tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    del strategy
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_ranks_and_runs_that_share_a_folder_do_not_meet(tmp_path: Path) -> None:
    found = [on_disk(tmp_path, {"a": 7})[0] for _ in range(3)]
    assert len({place.folder for place in found}) == len(list(tmp_path.iterdir())) == 3


def test_a_disk_without_room_is_told_at_once(tmp_path: Path) -> None:
    """And not by a signal, when what is not there is written to."""
    with pytest.raises(OSError, match=r"too large|No space"):
        Disk(tmp_path, 0, host).zeros("a", 2**60, np.dtype(np.float32))


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        Disk(tmp_path / "file", 0, host)


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes]]:
    """The file of every mapped array that is written to the disk, and what is in it then."""
    seen, really = [], np.memmap.flush

    def flush(x: np.memmap) -> None:
        seen.append((Path(str(x.filename)).name, x.tobytes()))
        really(x)

    monkeypatch.setattr(np.memmap, "flush", flush)
    return seen


class WritesNothing(Disk):
    """Lets go of what it has not written: the system may write it at some time, or never."""

    def end_update(self, arrays: list[Array]) -> None:
        for x in arrays:
            if x.size:
                x.base.madvise(mmap.MADV_DONTNEED)


@pytest.mark.parametrize("kind", [Disk, WritesNothing])
def test_a_unit_is_written_to_the_disk_as_soon_as_it_is_updated(
    kind: type[Disk], tmp_path: Path, flushed: list[tuple[str, bytes]]
) -> None:
    """Each of its files once, as it then is; and the masters when they are made."""
    before = []

    class Watched(kind):  # type: ignore[misc,valid-type]
        def begin_update(self, arrays: list[Array]) -> None:
            before.append(len(flushed))
            super().begin_update(arrays)

    place, offload, optimizer = on_disk(tmp_path, {"a": 7, "none": 0, "b": 5}, Watched)
    made = [name for name, _ in flushed]
    flushed.clear()
    update(offload, optimizer)
    if kind is WritesNothing:  # the negative control
        assert not made and not flushed
        return
    assert made == ["a.master", "b.master"] and before == [0, 3, 3]
    files = [f"{unit}.{what}" for unit in "ab" for what in ("master", "state1", "state2")]
    assert flushed == [(name, (place.folder / name).read_bytes()) for name in files]


def resident(folder: Path) -> int:
    """The bytes of mapped files in a folder that this process holds in memory."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-", line):
            is_ours = str(folder) in line
        elif is_ours and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


class HoldsOn(Disk):
    """Lets nothing go."""

    def end_update(self, arrays: list[Array]) -> None:
        pass


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what is resident")
@pytest.mark.parametrize("kind", [Disk, HoldsOn])
def test_one_unit_at_a_time_is_held_in_memory(kind: type[Disk], tmp_path: Path) -> None:
    mib, seen = 2**20, []

    class Watched(kind):  # type: ignore[misc,valid-type]
        def end_update(self, arrays: list[Array]) -> None:
            seen.append(resident(tmp_path))
            super().end_update(arrays)

    _, offload, optimizer = on_disk(tmp_path, dict.fromkeys("abc", mib // 4), Watched)
    assert seen == ([mib] * 3 if kind is Disk else [mib, 2 * mib, 3 * mib])
    seen.clear()
    update(offload, optimizer)
    assert seen == ([3 * mib] * 3 if kind is Disk else [5 * mib, 7 * mib, 9 * mib])
    assert resident(tmp_path) == (0 if kind is Disk else 9 * mib)
