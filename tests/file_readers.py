"""Every kind of file that the product reads: a good one, its reader, and what uses what was read.

    python -m tests.file_readers COUNT [FIRST_SEED [NAME]]

makes COUNT changed files of each kind (or of one), and prints the seeds of those that do something
else than work or be refused in one sentence.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

import collectives
from bench.results import compare, files
from collectives import algorithms, flight, simulate
from collectives.selection.decisions import Decisions, Measured, Ranks, Row, machine_in
from collectives.selection.machine_file import Fitted
from collectives.simulation import DEFAULT
from moe import RoutingLog
from moe.plan import __main__ as moe_plan
from parallel import Recipe, Trainer, checkpoint, text
from parallel.checkpoint.contents import METADATA_FILE, Checkpoint
from parallel.nn import gpt
from parallel.pipeline import __main__ as pipeline
from parallel.pipeline import make, write_csv
from tests.bench.results.test_compare import a_result
from tests.diagnostics.test_hang_report import call, dump, waiting
from tests.mutations import as_json, changed, changed_arrays, changed_bytes, changed_text

SECONDS = 10.0  # for one file, also while others use the processor
LONGEST = 2000  # characters of a sentence


class Kind(NamedTuple):
    """A kind of file.

    `name`: of the file.  `good`: its bytes.  `change`: a changed file.  `use`: reads the file and
    uses what it says; of a command the exit status.
    """

    name: str
    good: Callable[[], bytes]
    change: Callable[[bytes, Random], bytes]
    use: Callable[[Path], object]


# Decisions and machines


def decisions() -> bytes:
    """Tables of every collective on 2 and 4 ranks, and a machine."""
    tables = {
        collective: (
            Row(1000, ("binomial",) if collective == "broadcast" else (names[0],)),
            Row(float("inf"), tuple(names[:3])),
        )
        for collective in ("broadcast", "all_reduce", "all_to_all", "all_gather")
        for names in (algorithms.names(collective),)
    }
    measured = Measured({"mpi": "MPI 5", "when": "today"}, tables)
    fitted = Fitted({"mpi": "MPI 5"}, DEFAULT)
    host, devices = {Ranks(2): measured, Ranks(4): measured}, {Ranks(2): measured}
    return Decisions(host, fitted, devices).to_json().encode()


def decide(path: Path) -> None:
    """Make calls that are chosen by the file."""
    loaded = Decisions.from_json(path.read_bytes())
    for collective in ("broadcast", "all_reduce", "all_to_all", "all_gather"):
        for size in (2, 3, 4):
            for on_device in (False, True):
                collectives.choose(
                    collective, None, size, 10**6, decisions=loaded, on_device=on_device
                )

    def body(comm: collectives.Communicator) -> None:
        comm.load_decisions(path)
        assert comm.all_reduce(np.ones(5)).tolist() == [2.0] * 5
        assert comm.broadcast(np.full(5, comm.rank)).tolist() == [0] * 5
        assert comm.all_gather(np.full(1, comm.rank)).tolist() == [0, 1]

    collectives.run(body, 2, timeout=60)


def simulated(path: Path) -> int:
    """Compare algorithms on the machine in the file."""
    machine_in(path)
    words = ["all_reduce", "--ranks", "4", "--bytes", "4096", "--machine", str(path)]
    return simulate.COMMAND.main([*words, "--algorithm", "ring,linear,recursive_doubling"])


# Flight dumps


def flight_dump() -> bytes:
    """The dump of rank 1 of 3."""
    return json.dumps(dump(1, call("1"), waiting("2", 0))).encode()


def show_flight(path: Path) -> int:
    """Print a hang report."""
    return flight.COMMAND.main([str(path.parent)])


# Routings


@cache
def routing_log() -> bytes:
    """What two layers with experts route in one step."""
    model = {
        "gate": "stable",
        "num_experts": 4,
        "every": 1,
        "num_layers": 2,
        "hidden": 8,
        "num_heads": 2,
        "context": 8,
    }
    return moe_plan.on_text(model, 4, text.load(__file__)).log.to_bytes()


def plan_routing(path: Path) -> int:
    """Say what layers will send."""
    words = ["--mesh", "expert=2", "--moe", "stable", "--experts", "4", "--moe-every", "1"]
    words += ["--layers", "2", "--hidden", "8", "--heads", "2", "--routing", str(path)]
    log = RoutingLog.read(path)
    for step, name in list(log.parts):
        log.whole(step, name)
    return moe_plan.COMMAND.main(words)


# Checkpoints


@cache
def trainer() -> Trainer:
    """A small model on one rank."""
    made = Trainer(None, gpt(num_layers=1, hidden=2, num_heads=1, context=2), Recipe())
    made.start()
    return made


@cache
def saved() -> dict[str, bytes]:
    """The files of its checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(trainer(), folder, 3)
        return {file.name: file.read_bytes() for file in path.iterdir()}


def packed(files: dict[str, bytes]) -> bytes:
    """Files as one, for a reader that unpacks them."""
    return json.dumps({name: data.hex() for name, data in files.items()}).encode()


def changed_checkpoint(data: bytes, random: Random) -> bytes:
    """A checkpoint with a changed file, mostly with digests that fit."""
    files = {name: bytes.fromhex(words) for name, words in json.loads(data).items()}
    part = next(name for name in files if name != METADATA_FILE)
    kind = random.randrange(6)
    if kind == 0:
        name = random.choice([part, METADATA_FILE])
        files[name] = changed_bytes(files[name], random)
    elif kind == 1:
        del files[random.choice([part, METADATA_FILE])]
    elif kind == 2:
        files[part] = changed_bytes(files[part], random)
    elif kind == 3:
        files[part] = changed_part(files[part], random)
    index = json.loads(files[METADATA_FILE]) if kind >= 2 else None
    if index is not None:
        del index["digest"]
        if kind >= 4:
            index = changed(index, random)
        elif part in files:
            index["files"][part] = hashlib.sha256(files[part]).hexdigest()
        files[METADATA_FILE] = with_digest(index)
    return packed(files)


def with_digest(index: Any) -> bytes:
    """The index as it would be written."""
    digest = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    fields = index | {"digest": digest} if isinstance(index, dict) else index
    return (json.dumps(fields, indent=1) + "\n").encode()


def changed_part(data: bytes, random: Random) -> bytes:
    """A file of a rank with other tensors, or with boxes elsewhere."""
    tensors, length = safetensors.numpy.load(data), int.from_bytes(data[:8], "little")
    boxes = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["boxes"])
    name = random.choice(list(tensors))
    if random.randrange(2):
        boxes = changed(boxes, random)
    elif random.randrange(2):
        del tensors[name]
    else:
        x = tensors[name]
        others = [x.astype("f4"), x.ravel()[:-1], x[None], np.full_like(x, np.nan), x[:0]]
        tensors[name] = random.choice(others)
    return safetensors.numpy.save(tensors, metadata={"boxes": as_json(boxes).decode()})


def load_checkpoint(path: Path) -> None:
    """Load all of a checkpoint; if it is refused, the trainer is as before."""
    folder = path.with_name("step-00000003")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, words in json.loads(path.read_bytes()).items():
        (folder / name).write_bytes(bytes.fromhex(words))
    saved = Checkpoint(folder)
    saved.check(trainer())
    saved.check_files(0, 1)
    checkpoint.load(trainer(), folder)
    Checkpoint(folder).check_values(trainer().model)
    checkpoint.load_parameters(folder, trainer().model, None)


# Schedules and results


@cache
def schedule_file() -> bytes:
    """A schedule in cells."""
    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        write_csv(make("dualpipe", 4, 8).actions, Path(file.name))
        return file.read()


def changed_cells(data: bytes, random: Random) -> bytes:
    """A file of cells, of which some are others."""
    if random.randrange(2):
        return changed_bytes(data, random)
    cells = data.split(b",")
    odd = [b"", b"0F0", b"9F9", b"999999999F0", b"0F999999999", b"0UNSHARD", b"-1F0", b'"', b"\0"]
    odd += [
        b"(" * 2000 + b"0F0" + b")OVERLAP_F_B" * 2000,
        b"9" * 5000 + b"F0",
        b"(0F0;0B0)OVERLAP_F_B",
    ]
    for _ in range(random.choice([1, 2])):
        cells[random.randrange(len(cells))] = random.choice([*odd, random.choice(cells)])
    return b",".join(cells)


def show_schedule(path: Path) -> int:
    """Draw and simulate it."""
    return pipeline.COMMAND.main(["show", str(path), "--svg", str(path.with_name("picture.svg"))])


def bench_result() -> bytes:
    """What the microbenchmark writes."""
    return json.dumps(a_result()).encode()


def compare_results(path: Path) -> None:
    """Compare it with a good one, both ways."""
    good = path.with_name("good.json")
    good.write_bytes(bench_result())
    try:
        one, other = files.result(str(path)), files.result(str(good))
    except compare.argparse.ArgumentTypeError as error:
        raise ValueError(error) from None
    for pair in ((one, other), (other, one)):
        compare.table(compare.changes(*pair)).lines()


KINDS = {
    "decisions": Kind("decisions.json", decisions, changed_text, decide),
    "machine": Kind("machine.json", decisions, changed_text, simulated),
    "flight": Kind("flight.1.json", flight_dump, changed_text, show_flight),
    "routing": Kind("routing.npz", routing_log, changed_arrays, plan_routing),
    "checkpoint": Kind("packed", lambda: packed(saved()), changed_checkpoint, load_checkpoint),
    "schedule": Kind("schedule.csv", schedule_file, changed_cells, show_schedule),
    "result": Kind("result.json", bench_result, changed_text, compare_results),
}


def fault(kind: str, seed: int | None, folder: Path) -> str:
    """What is wrong with how a changed file is read; empty if nothing is.

    `seed`: of the change; None: the good file, which must not be refused.
    """
    name, good, change, use = KINDS[kind]
    path = folder / name
    path.write_bytes(good() if seed is None else change(good(), Random(seed)))
    if seed is None:
        return "" if use(path) in (None, 0) else "the good file is refused"
    begin = time.perf_counter()
    wrong = fault_of(lambda: use(path))
    seconds = time.perf_counter() - begin
    return wrong or (f"took {seconds:.0f} s" if seconds > SECONDS else "")


def fault_of(use: Callable[[], object]) -> str:
    """What is wrong with how something ends: neither well, nor in a sentence that can be shown."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
            status = use()
    except SystemExit as end:
        status = end.code
    except (OSError, ValueError) as error:
        return fault_of_sentence(f"{type(error).__name__}: {error}")
    except BaseException:  # noqa: BLE001 - anything else is a fault
        return traceback.format_exc()
    if status not in (None, 0, 2):
        return f"exit status {status!r}"
    return fault_of_sentence(printed.getvalue()) if status == 2 else ""


def fault_of_sentence(words: str) -> str:
    """What is wrong with a message."""
    lines = words.strip().splitlines()
    if not words.strip() or len(words) > LONGEST:
        return f"{len(words)} characters: {words[:300]!r}"
    if not all(line.isprintable() for line in lines):
        return f"control characters: {words!r}"
    return ""


def main(words: list[str]) -> int:
    """Print the faults of many files."""
    count, first = int(words[0]), int(words[1]) if len(words) > 1 else 0
    num_faults = 0
    for kind in words[2:] or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(first, first + count):
                if wrong := fault(kind, seed, Path(folder)):
                    num_faults += 1
                    print(f"{kind} {seed}: {wrong}", flush=True)
    print(f"{num_faults} faults")
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
