"""The command that runs everything that needs a GPU, where there need not be one."""

from __future__ import annotations

import argparse
import sys

import pytest

import collectives
from bench.gpu import __main__ as gpu
from bench.gpu import mps
from bench.gpu.__main__ import Limits, Step
from bench.provenance import provenance
from bench.training.strategies import KINDS
from collectives.launch.mpirun import MpiNotFound
from docs.generate import measured
from moe import train as mixtures
from parallel import train
from parallel.options import device_namespace
from tests.bench.parsing import parsed

MACHINE = {"provenance": provenance() | {"gpu": "a GPU", "cupy": "1.0"}}


def test_a_module_that_is_missing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "MODULES", ("numpy", "no_such_module"))
    with pytest.raises(SystemExit, match="2"):
        gpu.COMMAND.main(["--out", str(tmp_path / "out")])
    assert f"{sys.executable} has no no_such_module;" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_cupy_that_is_missing_is_said_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "MODULES", ())
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it could not be imported
    with pytest.raises(SystemExit, match="2"):
        gpu.COMMAND.main(["--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert said.startswith("python -m bench.gpu: nothing was run: CuPy is not installed")
    assert len(said.splitlines()) == 1


def test_a_driver_without_a_gpu_is_an_error_of_the_same_kind(monkeypatch):
    class Cupy:
        """As CuPy where there is no device: each kind of lack has an exception of its own."""

        def __getattr__(self, name):
            raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    monkeypatch.setitem(sys.modules, "cupy", Cupy())
    said = "--device cuda: this rank can use no GPU: CuPy finds no GPU .*no CUDA-capable device"
    with pytest.raises(ValueError, match=said):
        collectives.run(lambda comm: device_namespace("cuda", comm), 1)


@pytest.mark.slow
def test_what_fails_does_not_keep_the_others_from_running(tmp_path, capsys):
    programs = {"good": "print('served')", "bad one": "1 / 0", "late": "import time; time.sleep(9)"}
    made = [Step(name, ["-c", code]) for name, code in programs.items()]
    made.append(Step("last", ["-c", ""]))
    assert gpu.run_steps(made, tmp_path, MACHINE, limits=Limits(of_one=2)) == 1
    assert (tmp_path / "good.txt").read_text() == "served\n"
    assert "ZeroDivisionError" in (tmp_path / "bad_one.txt").read_text()
    summary = (tmp_path / "summary.txt").read_text()
    ends = [line.rpartition(",")[0] for line in summary.splitlines()[:4]]
    late = "failed: not done after 2 s: late"
    assert ends == ["ok: good", "failed with status 1: bad one", late, "ok: last"]
    assert summary.splitlines()[4] == f"2 of 4 steps failed; see {tmp_path}/"
    assert summary in capsys.readouterr().out


def test_when_the_time_is_up_the_rest_is_not_run(tmp_path):
    made = [Step("slow", ["-c", "import time; time.sleep(60)"]), Step("last", ["-c", "print(1)"])]
    assert gpu.run_steps(made, tmp_path, MACHINE, limits=Limits(of_all=1.5)) == 1
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert lines[0].startswith("failed: not done after 1 s: slow, ")
    assert lines[1] == "failed: no time was left: last, 0 s"
    assert (tmp_path / "last.txt").read_text() == ""


def test_tests_run_at_the_same_time(tmp_path):
    """Each waits for a file that the other makes."""
    code = """if True:
        import pathlib, sys, time
        mine, other = map(pathlib.Path, sys.argv[1:])
        mine.touch()
        while not other.exists():
            time.sleep(0.05)
    """
    both = [str(tmp_path / name) for name in ("a", "b")]
    made = [Step(f"tests {k}", ["-c", code, *both[::step]]) for k, step in enumerate((1, -1))]
    lines = gpu.all_ended([Step("last", ["-c", ""]), *made], tmp_path, Limits(of_one=30))
    assert [line.split(",")[0] for line in lines] == ["ok: tests 0", "ok: tests 1", "ok: last"]


def test_all_steps_end_in_nine_minutes():
    assert gpu.BUDGET + gpu.PATIENCE <= 9 * 60
    assert mps.QUIT_SECONDS * 6 < gpu.PATIENCE < gpu.LIMIT


def test_where_all_is_well_the_status_is_zero_and_the_rest_can_be_left_out(tmp_path, monkeypatch):
    both = [Step("good", ["-c", ""]), Step("bad", ["-c", "!"])]
    monkeypatch.setattr(gpu, "why_unavailable", lambda: None)
    monkeypatch.setattr(gpu, "facts", lambda: MACHINE)
    monkeypatch.setattr(gpu, "steps", lambda no_mpi: both)
    folder = tmp_path / "out"
    assert gpu.COMMAND.main(["--out", str(folder), "--only", "go"]) == 0
    assert [path.name for path in folder.glob("[gb]*.txt")] == ["good.txt"]
    assert gpu.COMMAND.main(["--out", str(folder)]) == 1


def test_without_an_mpi_it_says_what_is_left_out(tmp_path, monkeypatch, capsys):
    def find_mpirun():
        raise MpiNotFound("mpi4py finds no MPI library")

    monkeypatch.setattr("collectives.launch.mpirun.find_mpirun", find_mpirun)
    why = gpu.no_mpi()
    words = [word for step in gpu.steps(why) for word in step.command]
    assert "collectives.launch" not in words and "parallel.train" in words
    assert gpu.run_steps([], tmp_path, MACHINE, why) == 0
    said = capsys.readouterr().out
    assert "there is no MPI: what takes mpirun.  mpi4py finds no MPI library" in said


SMALL = "-b 1K -e 1K -w 0 -n 1 -m 1 --algorithm all --call"


def on_the_host(step):
    """The same step without a GPU, with one size of arrays."""
    words = " ".join(step.command).replace(gpu.SIZES, SMALL).replace("cuda", "cpu")
    return Step(step.name, words.split(), step.json)


@pytest.mark.slow
@pytest.mark.on_open_mpi
@pytest.mark.ranks(n=2)
def test_the_numbers_become_tables_of_the_documents(tmp_path):
    """Steps run on the host here; a run without an MPI has no numbers of collectives."""
    some = gpu.chosen(gpu.steps(None), ["collectives", "train tensor"])
    assert gpu.run_steps([*map(on_the_host, some)], tmp_path, MACHINE) == 0
    lines = measured.gpu_section(str(tmp_path / "gpu.json")).splitlines()
    assert lines[0] == measured.NOT_BESIDE
    assert lines[2].startswith("| collective | 1 KiB: best | call |")
    names = [line.split()[1] for line in lines if line.startswith("| ")]
    assert names.count("exscan") == 1 and "barrier" not in names
    (cells,) = [line.split(" | ") for line in lines if line.startswith("| tensor")]
    assert cells[1] == cells[2] and float(cells[4]) < float(cells[3])
    assert "CuPy 1.0, one a GPU for 2 ranks and " in lines[-1]
    failing = [Step("collectives", ["-c", "1 / 0"], "-J")]
    assert gpu.run_steps(failing, tmp_path, MACHINE) == 1  # what another run wrote does not count
    with pytest.raises(argparse.ArgumentTypeError, match="was not written by make gpu"):
        measured.gpu_section(str(tmp_path / "gpu.json"))


@pytest.mark.parametrize("no_mpi", [None, "mpi4py finds no MPI library"])
def test_every_step_is_a_command_that_can_be_run(no_mpi):
    commands = {step.name: list(step.command) for step in gpu.steps(no_mpi)}
    names = [*(kind.name.replace(",", "") for kind in KINDS), *gpu.LAYOUTS]
    trained = [commands.pop(f"train {name}") for name in names]
    folder = gpu.ROOT / "tests" / "gpu"
    paths = sorted({*folder.glob("test_*.py")} - {folder / gpu.KERNELS})
    kernels = commands.pop("kernels mps", None)
    assert kernels is None if no_mpi else kernels[-2:] == ["pytest", str(folder / gpu.KERNELS)]
    assert {"tests cupy", "tests devices"} < set(commands)
    tests = [commands.pop(name) for name in list(commands) if name.startswith(gpu.TESTS)]
    assert tests == [["-m", "pytest", str(path)] for path in paths]
    tables = {name: commands.pop(name) for name in list(commands) if name.startswith("devices ")}
    assert list(tables) == (
        [] if no_mpi else [f"devices {n}" for n in ("2", "2 mps", "4", "4 mps")]
    )
    for name, words in tables.items():
        options = parsed(words[words.index("bench") + 1 :])
        assert (options.device, options.native, len(options.sizes)) == ("cuda", True, 5)
        assert ("bench.gpu.mps" in words) == ("mps" in name)
        assert str(options.ngpus) == name.split()[1]
    assert set(commands) == (set() if no_mpi else {"collectives"})
    for words in trained:
        program, module = ("moe.train", mixtures) if "--moe" in words else ("parallel.train", train)
        options = module.COMMAND.parser().parse_args(words[words.index(program) + 1 :])
        assert options.device == "cuda" and options.threads == (2 if no_mpi else None)
    for words in commands.values():
        assert parsed(words[words.index("bench") + 1 :]).device == "cuda"
