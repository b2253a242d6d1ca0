"""The command that generates text: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe import generate, train
from moe.models.inference import Counted
from parallel.nn import Array, Step

SMALL = ["--layers", "2", "--hidden", "16", "--heads", "2", "--context", "24", "--experts", "4"]
PROMPTS = ["--prompt", "def ", "--prompt", "class A", "--prompt", "import"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder with a checkpoint of a model with experts, of two ranks."""
    folder = str(tmp_path_factory.mktemp("trained"))
    words = ["--threads", "2", "--mesh", "expert=2", "--moe", "switch", "--steps", "3"]
    assert train.COMMAND.main([*words, *SMALL, "--batch", "4", "--save", folder]) == 0
    return folder


def run(path: Path, *words: str) -> dict[str, Any]:
    assert (
        generate.COMMAND.main([*SMALL, *PROMPTS, "--tokens", "8", *words, "--json", str(path)]) == 0
    )
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_texts_are_the_same_on_every_mesh(trained: str, tmp_path: Path) -> None:
    options = ["--moe", "switch", "--checkpoint", trained, "--temperature", "1"]
    alone = run(tmp_path / "alone.json", *options, "--threads", "1")
    for mesh, size in (("expert=2,tensor=2", "4"), ("data=2,expert=2", "4"), ("tensor=2", "2")):
        found = run(tmp_path / "found.json", *options, "--threads", size, "--mesh", mesh)
        assert found["texts"] == alone["texts"] and len(alone["texts"]) == 3
        assert found["read_by_rank"]["predicted"] == found["read_by_rank"]["counted"]
        assert len(found["latencies"]) == len(found["read_per_token"]) == len(b"class A") + 8 - 5
    assert alone["texts"][1].startswith("class A")


def test_a_model_without_training_and_without_experts_generates_text(tmp_path: Path) -> None:
    found = run(tmp_path / "found.json", "--threads", "2")
    assert set(found["read_per_token"]) == {found["dense_per_token"]}


def test_the_command_prints_latency_and_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--moe", "bias", "--top-k", "2", "--moe-every", "1", "--threads", "2"]
    assert generate.COMMAND.main([*words, "--mesh", "expert=2", "--tokens", "9"]) == 0
    said = capsys.readouterr().out
    assert "latency of a token: median" in said and "99th percentile" in said
    expert = 8 * (16 * 64 + 64 + 64 * 16 + 16)
    assert f"bytes dense and {2 * 2 * expert} of experts" in said  # 2 of each of 2 blocks
    assert "token/block1/dispatch" in said and "predicted = recorded" in said


def test_a_read_more_than_predicted_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The negative control: experts that read although they get no tokens."""

    def forward(self: Counted, x: Array, step: Step) -> tuple[Array, Any]:
        self.count(self.nbytes)
        return self.expert.forward(x, step)

    monkeypatch.setattr(Counted, "forward", forward)
    assert generate.COMMAND.main([*SMALL, "--moe", "switch", "--threads", "1"]) == 1
    assert "weights read differ from the prediction" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--moe", "expert-choice"], "look at later tokens"),
        (["--mesh", "pipe=2"], "ranks along 'pipe' have no texts of their own"),
        (["--mesh", "context=2"], "ranks along 'context' have no texts of their own"),
        (["--mesh", "expert=2"], "need --moe GATE"),
        (["--top-k", "2"], "need --moe GATE"),
        (["--moe", "switch", "--top-k", "2"], "the gate switch has no option k"),
        (["--mesh", "data=3"], "a mesh of data=3 has 3 ranks, not 2"),
        (["--tokens", "24"], "the model has positions for 24"),
        (["--prompt", ""], "prompt 0 is empty"),
        (["--temperature", "-1"], "it must be a finite number from 0 on"),
        (["--checkpoint", "/nowhere"], "there is no checkpoint in /nowhere"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        generate.COMMAND.main([*SMALL, "--threads", "2", *words])
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_refused(
    trained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        generate.COMMAND.main([*SMALL, "--threads", "2", "--checkpoint", trained])
    assert "in the checkpoint, but" in capsys.readouterr().err
