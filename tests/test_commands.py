"""`python -m collectives` lists the commands, and each of them explains itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from collectives.__main__ import COMMANDS, about, lines

ROOT = Path(__file__).parent.parent


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_every_command_is_listed_with_what_it_does() -> None:
    listed = run("collectives")
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.splitlines() == list(lines())
    for module in COMMANDS:
        assert f"python -m {module}" in listed.stdout
        assert f"  {about(module)}:\n" in listed.stdout


@pytest.mark.parametrize("module", COMMANDS)
def test_every_command_explains_itself(module: str) -> None:
    helped = run(module, "--help")
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.startswith("usage: ")


def test_every_module_with_a_command_is_listed() -> None:
    with_main = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for package in ("collectives", "parallel", "moe", "bench")
        for path in (ROOT / package).rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    # Programs that a command starts, not a user.
    started = {"collectives.launch.bootstrap", "bench.starting", "bench.sweep", "bench.gpu",
               "bench.moe_ranks", "bench.torch.ranks", "bench.torch.start",
               "bench.torch.traffic_ranks"}  # fmt: skip
    assert with_main - started == {"collectives", *COMMANDS}
