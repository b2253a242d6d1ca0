"""The README is true: its example runs and prints what it says, its files exist."""

from __future__ import annotations

import re
from pathlib import Path

from collectives.launch import launch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    done = launch(4, [str(script)], timeout=60, env={"PYTHONPATH": str(ROOT)}, capture=True)
    assert done.returncode == 0, done.stderr
    assert len(example.strip().splitlines()) <= 12
    lines = sorted(done.stdout.split("\n"))
    assert "0 6.0 example all_reduce 6 6000000" in lines
    assert "3 6.0 example reduce_scatter 3 3000000" in lines


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) >= 4
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_command_of_make_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    documents = README + (ROOT / "CONTRIBUTING.md").read_text()
    commands = re.findall(r"(?:^|`)(?:MPI=\w+ )?make (\w+)", documents, re.MULTILINE)
    assert {"demo", "test"} <= set(commands) <= targets
