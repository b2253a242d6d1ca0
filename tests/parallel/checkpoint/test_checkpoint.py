"""Checkpoints: going on to the last bit, under other ranks too, and whoever dies while saving."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy

import collectives
from collectives import Communicator
from parallel import PowerSGD, Recipe, TrafficMismatch, TrafficTable, Trainer, checkpoint, text
from parallel.checkpoint import LoadFailed, SaveFailed, latest, load, save
from parallel.checkpoint.contents import Index
from parallel.nn import gpt
from parallel.optim import SGD, AdamW
from parallel.optim.storage import Disk, HostMemory
from parallel.strategies import SyncParameterServer
from tests.parallel.training import ddp, hsdp, zero1, zero2, zero3, zeropp

ROOT = Path(__file__).parents[3]
DATA = np.frombuffer(bytes(range(256)) * 8, np.uint8)
CONTEXT, BATCH = 4, 11


def reference(comm: Communicator, *args: Any) -> Trainer:
    return Trainer(None, *args)


def in_pairs(kind: Any) -> Any:
    return partial(kind, group_size=2)


def make(comm: Communicator, kind: Any = zero3, hidden: int = 6, **recipe: Any) -> Any:
    """Units of 1560, 510 and 1548 elements, which 4, 5 and 8 ranks divide unevenly."""
    return kind(
        comm, gpt(num_layers=1, hidden=hidden, num_heads=2, context=CONTEXT), Recipe(**recipe)
    )


def batch(step: int, rank: int, ranks: int) -> Any:
    where = {"rank": rank, "num_ranks": ranks}
    return text.batch(DATA, seed=0, step=step, batch_size=BATCH, context=CONTEXT, **where)


def train(strategy: Trainer, steps: int, first: int = 0) -> list[float]:
    return strategy.train(steps, batch, BATCH * CONTEXT, lambda step, loss: None, first)


class State(NamedTuple):
    """What a rank holds, copied."""

    arrays: dict[str, tuple[slice, np.ndarray]]  # by name, and which elements of the unit
    parameters: dict[str, tuple[slice, np.ndarray]]
    numbers: tuple[float, ...]


def arrays_of(strategy: Trainer, unit: str) -> dict[str, Any]:
    """The arrays of a unit that this rank updates."""
    kinds = {"values": strategy.masters, **strategy.optimizer.states}
    return {f"{unit}.{kind}": flats[unit] for kind, flats in kinds.items()}


def state(strategy: Trainer) -> State:
    scale, units = strategy.loss_scale, strategy.model.units
    return State(
        {
            name: (strategy.view.shard_slice(unit), flat.copy())
            for unit in units
            for name, flat in arrays_of(strategy, unit).items()
        },
        {
            unit: (strategy.view.stored_slice(unit), strategy.parameters[unit].copy())
            for unit in units
        },
        (strategy.optimizer.steps, strategy.updates.num_skipped, scale.value, scale.num_good),
    )


def bits(state: State) -> Any:
    """To compare to the last bit, NaNs and signs of zeros too."""
    held = {k: (x.dtype, x.tobytes()) for d in state[:2] for k, (_, x) in d.items()}
    return held, state.numbers


def whole(states: list[State]) -> dict[str, tuple[Any, bytes]]:
    """The arrays that all ranks hold together.  Where several hold the same it must be the same."""
    found: dict[str, np.ndarray] = {}
    for name, (_, first) in states[0].arrays.items():
        size = max(state.arrays[name][0].stop for state in states)
        found[name] = np.full(size, np.nan, first.dtype)
    for st in states:
        for name, (part, x) in st.arrays.items():
            there = found[name][part]
            assert (np.isnan(there) | (there == x)).all(), f"ranks differ in {name}"
            found[name][part] = x
    return {name: (x.dtype, x.tobytes()) for name, x in found.items()}


def on_ranks(size: int, fn: Callable[[Communicator], Any]) -> list[Any]:
    return list(collectives.run(fn, size=size))


def errors(size: int, fn: Callable[[Communicator], Any]) -> list[str]:
    """What every rank raises.  All must."""

    def caught(comm: Communicator) -> str:
        with pytest.raises((SaveFailed, LoadFailed)) as raised:
            fn(comm)
        return f"{type(raised.value).__name__}: {raised.value}"

    return on_ranks(size, caught)


def saved(
    root: Path, size: int = 3, *, step: int = 1, trained: int = 0, **options: Any
) -> list[State]:
    """A checkpoint in `root`, after so many real steps, and what its ranks held."""

    def fn(comm: Communicator) -> State:
        strategy = make(comm, **options)
        strategy.start()
        train(strategy, trained)
        save(strategy, root, step)
        return state(strategy)

    return on_ranks(size, fn)


def loaded(path: Path, size: int = 3, **options: Any) -> list[State]:
    """What ranks hold that have other values, each its own, and then load."""

    def fn(comm: Communicator) -> State:
        strategy = make(comm, seed=1 + comm.rank, **options)
        load(strategy, path)
        return state(strategy)

    return on_ranks(size, fn)


# --- going on -----------------------------------------------------------------------------------

KINDS = {
    "reference": (reference, 1),
    "ddp": (ddp, 3),
    "zero1": (zero1, 3),
    "zero2": (zero2, 2),
    "zero3": (zero3, 4),
    "hsdp": (in_pairs(hsdp), 4),
    "zeropp": (in_pairs(zeropp), 4),
    "server": (SyncParameterServer, 3),
}
CASES = [
    *((name, "float16") for name in KINDS),
    ("reference", "float32"),
    ("ddp", "float64"),
    ("zero1", "bfloat16"),
    ("zero2", "float64"),
    ("zero3", "float32"),
    ("hsdp", "bfloat16"),
]


def begun(comm: Communicator, kind: Any, dtype: str, seed: int = 0, **recipe: Any) -> Any:
    """Before training.  In float16 the gradients of steps 1 and 4 overflow, and are not used."""
    strategy = make(comm, kind, dtype=dtype, seed=seed, clip=0.5, optimizer=AdamW, **recipe)
    really, scale = strategy.scalars.own_squares, strategy.loss_scale

    def own_squares() -> float:
        done = strategy.optimizer.steps + strategy.updates.num_skipped
        return really() + (np.inf if done in (1, 4) else 0.0)

    if scale.is_dynamic:
        scale.value = 8.0 if seed else 1024.0
        scale.interval, strategy.scalars.own_squares = 2, own_squares
    strategy.start()
    return strategy


def interrupted(
    root: Path, kind: Any, size: int, dtype: str, spoil: Any = None, **recipe: Any
) -> tuple[Any, Any]:
    """Losses and all bits after 5 steps: at a stretch, and loaded after 3."""

    def at_a_stretch(comm: Communicator) -> Any:
        strategy = begun(comm, kind, dtype, **recipe)
        train(strategy, 3)
        save(strategy, root, 3)
        if dtype == "float16":
            assert state(strategy).numbers == (2, 1, 512.0, 1), "nothing here is zero"
        losses = train(strategy, 5, first=3)
        return losses, bits(state(strategy))

    def resumed(comm: Communicator) -> Any:
        strategy = begun(comm, kind, dtype, seed=1, **recipe)
        step = load(strategy, root / "step-00000003")
        if spoil is not None:
            spoil(strategy)
        return train(strategy, 5, first=step), bits(state(strategy))

    return on_ranks(size, at_a_stretch), on_ranks(size, resumed)


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.slow
def test_training_goes_on_to_the_last_bit(tmp_path: Path, name: str, dtype: str) -> None:
    one, other = interrupted(tmp_path, *KINDS[name], dtype)
    assert one == other


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_training_goes_on_to_the_last_bit_wherever_updates_are_made(
    tmp_path: Path, dtype: str
) -> None:
    for offload in (HostMemory, partial(Disk, tmp_path / "states")):
        one, other = interrupted(tmp_path / str(offload), zero2, 2, dtype, offload=offload)
        assert one == other


def forget_steps(strategy: Trainer) -> None:
    strategy.optimizer.steps = 0


def forget_a_moment(strategy: Trainer) -> None:
    strategy.optimizer.states["second"]["head"][-1:] = 0


def forget_the_masters(strategy: Trainer) -> None:
    for unit, master in strategy.masters.items():
        master[...] = strategy.arrays.parameter_shards[unit].astype(np.float32)


def forget_the_good_steps(strategy: Trainer) -> None:
    strategy.loss_scale.num_good = 1 - strategy.loss_scale.num_good


FORGET = [forget_steps, forget_a_moment, forget_the_masters, forget_the_good_steps]


@pytest.mark.parametrize("spoil", FORGET)
def test_an_array_that_is_not_saved_is_noticed(tmp_path: Path, spoil: Any) -> None:
    one, other = interrupted(tmp_path, zero2, 2, "float16", spoil)
    assert one != other


def test_loading_fills_the_arrays_that_are_there(tmp_path: Path) -> None:
    saved(tmp_path, dtype="float16", kind=zero1)

    def fn(comm: Communicator) -> None:
        strategy = make(comm, zero1, dtype="float16")
        strategy.start()
        memory = strategy.memory
        before = dict(memory.now), dict(memory.peak)
        arrays = [arrays_of(strategy, unit) for unit in strategy.model.units]
        load(strategy, tmp_path / "step-00000001")
        assert (dict(memory.now), dict(memory.peak)) == before
        for unit, were in zip(strategy.model.units, arrays, strict=True):
            now = arrays_of(strategy, unit)
            assert all(now[name] is x for name, x in were.items())

    on_ranks(3, fn)


# --- other strategies, other ranks --------------------------------------------------------------

MOVES = [
    ("zero3", 8, "ddp", 3, "float64"),
    ("ddp", 3, "zero3", 5, "bfloat16"),
    ("hsdp", 4, "zero1", 3, "float16"),
    ("zero1", 2, "hsdp", 4, "bfloat16"),
    ("reference", 1, "zero2", 5, "float32"),
    ("zero2", 4, "reference", 1, "bfloat16"),
    ("zero3", 2, "zero3", 3, "float16"),
    ("server", 2, "zero3", 3, "float16"),
    ("zeropp", 4, "server", 3, "float32"),
]


@pytest.mark.parametrize(("one", "ranks", "other", "others", "dtype"), MOVES)
def test_any_number_of_ranks_loads_what_any_number_saved(
    tmp_path: Path, one: str, ranks: int, other: str, others: int, dtype: str
) -> None:
    before = saved(tmp_path, ranks, trained=1, kind=KINDS[one][0], dtype=dtype)
    after = loaded(tmp_path / "step-00000001", others, kind=KINDS[other][0], dtype=dtype)
    assert whole(after) == whole(before)
    assert {st.numbers for st in after} == {before[0].numbers}
    values = whole_parameters(before)
    for st in after:
        for unit, (part, x) in st.parameters.items():
            assert x.tobytes() == values[unit][part].tobytes()


def whole_parameters(states: list[State]) -> dict[str, np.ndarray]:
    found = {}
    for unit, (_, x) in states[0].parameters.items():
        size = max(st.parameters[unit][0].stop for st in states)
        found[unit] = np.empty(size, x.dtype)
        for st in states:
            found[unit][st.parameters[unit][0]] = st.parameters[unit][1]
    return found


@pytest.mark.parametrize("name", KINDS)
def test_every_element_is_written_once(tmp_path: Path, name: str) -> None:
    kind, size = KINDS[name]
    states = saved(tmp_path, size, trained=1, kind=kind)
    files = [*(tmp_path / "step-00000001").glob("*.safetensors")]
    assert len(files) == size
    sizes = [sum(x.size for x in safetensors.numpy.load_file(file).values()) for file in files]
    elements = sum(len(data) // 8 for _, data in whole(states).values())
    assert sum(sizes) == elements
    if name != "server":
        assert max(sizes) - min(sizes) <= 9, "three arrays of three units, divided evenly"


# --- what is not whole --------------------------------------------------------------------------


def part(path: Path, rank: int, ranks: int = 3) -> Path:
    return path / f"rank-{rank}-of-{ranks}.safetensors"


def remove(path: Path) -> None:
    part(path, 1).unlink()


def truncate(path: Path) -> None:
    data = part(path, 1).read_bytes()
    part(path, 1).write_bytes(data[:-8])


def garble(path: Path) -> None:
    data = part(path, 1).read_bytes()
    part(path, 1).write_bytes(data[:8] + b"\xff" + data[9:])


def repeat(path: Path) -> None:
    shutil.copy(part(path, 0), part(path, 1))


def exchange_steps(path: Path) -> None:
    edit(part(path, 1), lambda tensors, about: about.update(boxes='{"step": 7, "starts": {}}'))


def flip_a_byte(path: Path) -> None:
    data = bytearray(part(path, 1).read_bytes())
    data[-9] ^= 1
    part(path, 1).write_bytes(data)


def rename_the_step(path: Path) -> None:
    shutil.copytree(path, path.with_name("copy"))
    shutil.rmtree(path)
    shutil.move(path.with_name("copy"), path.with_name("step-00000004"))
    path.symlink_to(path.with_name("step-00000004"))


def change_the_index(**fields: Any) -> Callable[[Path], None]:
    """As if somebody else had written it, with a digest that fits."""

    def spoil(path: Path) -> None:
        known = json.loads((path / "checkpoint.json").read_text())
        del known["digest"]
        known["optimizer"] |= fields.pop("optimizer", {})
        (path / "checkpoint.json").write_text(Index(**(known | fields)).to_json())

    return spoil


def edit_the_index(path: Path) -> None:
    text = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(text.replace('"num_skipped": 0', '"num_skipped": 1'))


def respell_the_index(path: Path) -> None:
    """The same contents, in other bytes."""
    text = (path / "checkpoint.json").read_bytes()
    (path / "checkpoint.json").write_bytes(text.replace(b"\n", b"\r", 1))


def leave_a_field_out(path: Path) -> None:
    known = json.loads((path / "checkpoint.json").read_text())
    del known["loss_scale"]
    (path / "checkpoint.json").write_text(json.dumps(known))


def of_head(tensors: dict[str, Any]) -> str:
    return next(name for name in tensors if name.startswith("head.") and "/first" in name)


def leave_one_out(path: Path) -> None:
    edit(part(path, 1), lambda tensors, about: tensors.pop(of_head(tensors)))


def halve(path: Path) -> None:
    def change(tensors: dict[str, Any], about: dict[str, str]) -> None:
        tensors[of_head(tensors)] = tensors[of_head(tensors)].astype(np.float32)

    edit(part(path, 1), change)


def edit(file: Path, change: Callable[[dict[str, Any], dict[str, str]], Any]) -> None:
    tensors = safetensors.numpy.load_file(file)
    with safetensors.safe_open(file, framework="numpy") as opened:
        about = opened.metadata()
    change(tensors, about)
    safetensors.numpy.save_file(tensors, file, metadata=about)


def break_the_description(path: Path) -> None:
    (path / "checkpoint.json").write_text('{"step": 1,')


def remove_the_description(path: Path) -> None:
    (path / "checkpoint.json").unlink()


FAULTS = {
    remove: "rank-1-of-3.safetensors",
    truncate: "rank-1-of-3.safetensors is broken",
    garble: "rank-1-of-3.safetensors is broken",
    repeat: "elements of embedding.token/values occur twice",
    exchange_steps: "rank-1-of-3.safetensors is not of step 1",
    leave_one_out: "rank-1-of-3.safetensors has no tensor 'head",
    halve: "/first is F32, not F64",
    flip_a_byte: "rank-1-of-3.safetensors was changed after it was written",
    edit_the_index: "checkpoint.json is broken: it was changed after it was written",
    respell_the_index: "checkpoint.json is broken: it was changed after",
    leave_a_field_out: "it has no field 'loss_scale'",
    change_the_index(step=-4): "step is '-4': it must be an integer of at least 0",
    change_the_index(step=3): "step-00000001 contains step 3",
    change_the_index(num_skipped="none"): "num_skipped is 'none'",
    change_the_index(optimizer={"steps": 10**400}): "optimizer.steps is '1000",
    change_the_index(loss_scale={"value": 0.0, "num_good": 0}): "loss_scale.value is 0.0",
    change_the_index(loss_scale={"value": 1.5, "num_good": 0}): "it must be 1 in float64",
    change_the_index(files=[]): "files is",
    change_the_index(files={"../step-00000002/rank-0-of-1.safetensors": ""}): "files are",
    change_the_index(layout={"dtype": ["float64"]}): "states: nothing in the checkpoint",
    break_the_description: "checkpoint.json is broken",
    remove_the_description: "there is no checkpoint in",
}


def refused(path: Path, size: int = 2, **options: Any) -> str:
    """What all ranks say who try to load; they hold then what they held before."""

    def fn(comm: Communicator) -> None:
        strategy = make(comm, **options)
        strategy.start()
        before = bits(state(strategy))
        try:
            load(strategy, path)
        finally:
            assert bits(state(strategy)) == before

    (said,) = set(errors(size, fn))
    assert said.startswith(f"LoadFailed: loading {path.name} failed: ranks 0, 1: ")
    return said


@pytest.mark.parametrize("spoil", FAULTS, ids=FAULTS.values())
def test_what_is_broken_is_noticed_before_anything_is_changed(tmp_path: Path, spoil: Any) -> None:
    saved(tmp_path)
    path = tmp_path / "step-00000001"
    spoil(path)
    with pytest.raises(AssertionError, match=FAULTS[spoil]):
        raise AssertionError(refused(path))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hidden": 8}, "shapes: ['embedding.token', [256, 6]] in the checkpoint"),
        ({"dtype": "float32"}, "dtype: float64 in the checkpoint, but float32 in the strategy"),
        ({"optimizer": SGD}, "states: first in the checkpoint, but velocity in the strategy"),
    ],
)
def test_what_is_of_something_else_is_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    saved(tmp_path)
    assert said in refused(tmp_path / "step-00000001", **options)


def test_a_hook_whose_arrays_have_other_shapes_is_refused(tmp_path: Path) -> None:
    def compressed(rank: int) -> Any:
        return lambda comm, *args: ddp(comm, *args, hook=PowerSGD(rank))

    saved(tmp_path, 2, kind=compressed(1), hidden=8)
    said = refused(tmp_path / "step-00000001", kind=compressed(2), hidden=8)
    assert "basis.head.out.table has the shape [8, 1], not [8, 2]" in said


def test_where_there_is_no_checkpoint_this_is_said(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert f"there is no checkpoint in {tmp_path / 'nowhere'}" in refused(tmp_path / "nowhere")


def test_one_rank_that_cannot_read_is_enough(tmp_path: Path) -> None:
    """As on a machine that has another disk: all refuse, and say whose fault it is."""
    saved(tmp_path / "here")

    def fn(comm: Communicator) -> None:
        strategy = make(comm)
        load(strategy, tmp_path / ("there" if comm.rank == 1 else "here") / "step-00000001")

    (said,) = set(errors(3, fn))
    assert "loading step-00000001 failed: rank 1: there is no checkpoint in" in said


# --- what is refused when saving ----------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{"step": -1}, {"step": 1, "keep": 0}], ids=str)
def test_bad_arguments_are_refused_before_any_message(
    tmp_path: Path, arguments: dict[str, int]
) -> None:
    def fn(comm: Communicator) -> None:
        strategy = make(comm)
        with comm.record() as ledger:
            if comm.rank == 0:  # alone: nobody waits for the others
                with pytest.raises(ValueError, match=r"step is .* and keep is"):
                    save(strategy, tmp_path, **arguments)
        assert not list(ledger.rows())

    on_ranks(2, fn)
    assert not list(tmp_path.iterdir())


def test_a_step_is_not_saved_twice(tmp_path: Path) -> None:
    before = saved(tmp_path)
    (said,) = set(errors(3, lambda comm: save(make(comm), tmp_path, 1)))
    assert "saving step 1 failed: rank 0: this step has been saved already" in said
    assert whole(loaded(tmp_path / "step-00000001")) == whole(before)


def test_ranks_that_save_different_steps_all_hear_of_it(tmp_path: Path) -> None:
    (said,) = set(errors(3, lambda comm: save(make(comm), tmp_path, 5 + (comm.rank == 1))))
    assert "ranks 0, 2: saving step 5; rank 1: saving step 6" in said
    assert latest(tmp_path) is None and not list(tmp_path.iterdir())


# --- those that are kept ------------------------------------------------------------------------


def test_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    strategy = make(None, kind=reference)  # type: ignore[arg-type]
    for step in (3, 20, 100):
        save(strategy, tmp_path, step, keep=4)
    assert len([*tmp_path.iterdir()]) == 3
    save(strategy, tmp_path, 7, keep=3)
    names = ["step-00000007", "step-00000020", "step-00000100"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert latest(tmp_path) == tmp_path / "step-00000100"
    assert save(strategy, tmp_path, 10**8, keep=1) == latest(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-100000000"]


# --- one fails, or dies, while saving -----------------------------------------------------------

WHO_FAILS = {"prepare": 0, "write_part": 1, "finish": 0, "remove_old": 0}


@pytest.mark.parametrize("stage", WHO_FAILS)
def test_if_one_rank_fails_all_do_and_the_last_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    before = saved(tmp_path)
    stop(monkeypatch, stage)
    (said,) = set(errors(3, lambda comm: save(make(comm), tmp_path, 2)))
    assert "SaveFailed: saving step 2 failed: rank" in said
    assert f"rank {WHO_FAILS[stage]}: [Errno 28] no room" in said
    assert whole(loaded(tmp_path / "step-00000001")) == whole(before)
    monkeypatch.undo()
    saved(tmp_path, step=3)
    assert not list(tmp_path.glob(".*")) and latest(tmp_path) == tmp_path / "step-00000003"


def test_what_is_not_whole_is_not_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if rank 1's file system were another one."""
    really = checkpoint.write_part

    def write_part(strategy: Trainer, folder: Path, step: int) -> bytes:
        return bytes(32) if strategy.rank == 1 else really(strategy, folder, step)

    monkeypatch.setattr(checkpoint, "write_part", write_part)
    (said,) = set(errors(3, lambda comm: save(make(comm), tmp_path, 2)))
    assert "saving step 2 failed: rank 0: No such file" in said and "rank-1-of-3" in said
    assert not list(tmp_path.iterdir())


def stop(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """A disk that is full when this stage begins; of writing, for one rank alone."""
    really = getattr(checkpoint, stage)

    def full(*args: Any) -> Any:
        if stage == "write_part" and args[0].rank != WHO_FAILS[stage]:
            return really(*args)
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(checkpoint, stage, full)


ANYWHERE = '''
import os, shutil, signal, sys
from pathlib import Path
from parallel import checkpoint
from tests.parallel.checkpoint.test_checkpoint import make, reference

FOLDER = os.path.dirname(checkpoint.__file__)

def die_at(number):
    """Of the lines that run, each counted once."""
    seen = set()
    def trace(frame, event, arg):
        if not frame.f_code.co_filename.startswith((FOLDER, shutil.__file__)):
            return None
        if event == "line":
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            if len(seen) > number:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    return trace

root, step = Path(sys.argv[1]), Path(sys.argv[1], "step-00000002")
strategy = make(None, kind=reference)
checkpoint.save(strategy, root, 1)
(root / ".unfinished-step-00000009" / "something").mkdir(parents=True)
lines = before = after = torn = 0
while True:
    child = os.fork()
    if child == 0:
        sys.settrace(die_at(lines))
        checkpoint.save(strategy, root, 2, keep=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    newest = checkpoint.latest(root)
    assert newest in (root / "step-00000001", step), newest
    checkpoint.load(strategy, newest)
    if status == 0:
        break
    assert status == signal.SIGKILL, status
    torn += any((root / ".unfinished-step-00000002").glob("rank*"))
    before, after = before + (newest != step), after + (newest == step)
    if newest == step:
        checkpoint.save(strategy, root, 3)
        assert not list(root.glob(".*"))
        shutil.rmtree(root)
        checkpoint.save(strategy, root, 1)
    lines += 1
assert [path.name for path in root.iterdir()] == ["step-00000002"]
print(before, after, torn)
'''


@pytest.mark.slow
def test_wherever_a_rank_is_killed_a_whole_checkpoint_is_there(tmp_path: Path) -> None:
    """At each line of saving and of removing, one after the other."""
    command = [sys.executable, "-c", ANYWHERE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    before, after, torn = map(int, done.stdout.split())
    assert before > 80 and after > 5 and torn > 20


# --- traffic ------------------------------------------------------------------------------------


def table(size: int, kind: Any, root: Path) -> tuple[TrafficTable, TrafficTable]:
    """Of a save and a load; and the control, in which the load is not predicted."""

    def fn(comm: Communicator) -> Any:
        strategy = make(comm, kind)
        with comm.record() as ledger:
            strategy.start()
            train(strategy, 2)
            save(strategy, root, 2)
            train(strategy, 3, load(strategy, root / "step-00000002"))
        whole = ledger.gather()
        if whole is None:
            return None
        calls = [*strategy.traffic(3), *checkpoint.traffic(strategy)]
        loads = checkpoint.traffic(strategy, "load")
        return [TrafficTable(c, whole, None, size=size) for c in ([*calls, *loads], calls)]

    return on_ranks(size, fn)[0]


@pytest.mark.parametrize(("kind", "size"), [(ddp, 3), (zero2, 4), (zero1, 1)])
def test_what_a_checkpoint_sends_is_predicted(tmp_path: Path, kind: Any, size: int) -> None:
    right, control = table(size, kind, tmp_path)
    assert "two columns compared" in right.check()
    if size > 1:
        with pytest.raises(TrafficMismatch, match="load/all_gather: predicted 0 calls"):
            control.check()


def test_the_description_can_be_read_by_people(tmp_path: Path) -> None:
    saved(tmp_path, step=2, optimizer=partial(AdamW, lr=0.01))
    about = json.loads((tmp_path / "step-00000002" / "checkpoint.json").read_text())
    assert about["step"] == 2 and len(about["files"]) == 3
    assert about["layout"]["dtype"] == ["float64"]
    assert about["optimizer"]["class"] == "AdamW" and about["optimizer"]["lr"] == 0.01
    assert about["layout"]["shapes"][0] == ["embedding.token", [256, 6]]
