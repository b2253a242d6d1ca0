"""Two sides of a slot run by turns: one at a time, and what is kept changes in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest

import collectives
from collectives import Communicator
from parallel import Mesh, Recipe, Sharding, Trainer, gpt
from parallel.pipeline import Schedule
from parallel.pipeline.text import parse
from parallel.run.computing.alternation import Alternation
from parallel.step import LayerAction, LayerBackward, LayerForward
from tests.parallel.training import CONTEXT

label: ContextVar[str] = ContextVar("label", default="")


@contextmanager
def phase(name: str) -> Iterator[None]:
    token = label.set(name)
    yield
    label.reset(token)


def actions(letters: str) -> list[LayerAction]:
    """An action of a layer for each letter, numbered for each kind."""
    kinds: dict[str, tuple[type[LayerAction], str]] = {
        "F": (LayerForward, "forward"),
        "B": (LayerBackward, "backward"),
    }
    return [
        kinds[letter][0](
            layer=f"layer{i}",
            stage=0,
            micro_batch=letters[:i].count(letter),
            phase=kinds[letter][1],
            slot=0,
        )
        for i, letter in enumerate(letters)
    ]


def ignore(*_: object) -> None:
    """Record nothing."""


def run(kinds: str, waits: int = 1, *, is_in_order: bool = True) -> list[str]:
    """What happened: each action starts to send, waits so often, and is done in order."""
    log: list[str] = []
    turns = Alternation()

    def do(action: LayerAction) -> None:
        assert label.get() == action.phase
        name = f"{action.kind}{action.micro_batch}"
        log.append(f"{name} starts")
        for _ in range(waits):
            turns.pass_on()
            log.append(f"{name} waits")
        if is_in_order:
            turns.in_order()
        log.append(f"{name} ends")

    turns.run(actions(kinds), do, phase, ignore)
    assert not turns.is_in_slot and label.get() == ""
    return log


def test_each_side_waits_after_the_other_has_started() -> None:
    assert run("FB") == ["F0 starts", "B0 starts", "F0 waits", "F0 ends", "B0 waits", "B0 ends"]


@pytest.mark.parametrize("waits", [0, 1, 2, 5])
@pytest.mark.parametrize("kinds", ["FB", "FBFB", "FFFBB", "BFFBFFFB", "FFF"])
def test_actions_end_in_their_order(kinds: str, waits: int) -> None:
    """Whatever waits; and begin in the order of their side."""
    log = run(kinds, waits)
    wanted = [f"{each.kind}{each.micro_batch}" for each in actions(kinds)]
    assert [name for name, what in map(str.split, log) if what == "ends"] == wanted
    for kind in "FB":
        begun = [name for name, what in map(str.split, log) if what == "starts" and kind in name]
        assert begun == [name for name in wanted if kind in name]


def test_without_an_order_a_side_runs_ahead() -> None:
    """The negative control."""
    ends = [each for each in run("FFFBBB", 0, is_in_order=False) if each.endswith("ends")]
    assert ends == [f"{kind}{i} ends" for kind in "FB" for i in range(3)]
    ends = [each for each in run("BFBFBF", 0, is_in_order=False) if each.endswith("ends")]
    assert ends != [f"{kind}{i} ends" for i in range(3) for kind in "BF"]


def test_one_side_runs_at_a_time() -> None:
    running: list[str] = []
    turns = Alternation()

    def do(action: LayerAction) -> None:
        for _ in range(50):
            assert not running
            running.append(action.kind)
            sum(range(1000))
            running.pop()
            turns.pass_on()

    turns.run(actions("FB"), do, phase, ignore)


def test_parts_of_actions_are_recorded() -> None:
    """Each as long as it has its turn."""
    found: list[tuple[str, float, float]] = []
    turns = Alternation()
    record = lambda action, began, ended: found.append((action.kind, began, ended))  # noqa: E731
    turns.run(actions("FB"), lambda _: turns.pass_on(), phase, record)
    assert [kind for kind, _, _ in found] == ["F", "B", "F", "B"]
    times = [each for _, *both in found for each in both]
    assert times == sorted(times)


@pytest.mark.parametrize("kind", ["F", "B"])
def test_an_error_ends_both_sides(kind: str) -> None:
    turns, closed = Alternation(), []

    def do(action: LayerAction) -> None:
        try:
            turns.pass_on()
            turns.pass_on()
            if action.kind == kind:
                raise ArithmeticError("of this side")
            turns.in_order()
            turns.pass_on()
        except ArithmeticError:
            raise
        except BaseException:
            closed.append(action.kind)
            raise

    with pytest.raises(ArithmeticError, match="of this side"):
        turns.run(actions("FB" if kind == "B" else "BF"), do, phase, ignore)
    assert not turns.is_in_slot
    turns.run(actions("FB"), lambda _: turns.pass_on(), phase, ignore)  # it can be used again


def test_outside_of_a_slot_there_are_no_turns() -> None:
    turns = Alternation()
    turns.pass_on()
    turns.in_order()


def test_a_side_keeps_the_context_in_which_it_began() -> None:
    """Although each turn is in the phase of its action."""
    labels: list[tuple[str, str]] = []
    number: ContextVar[int] = ContextVar("number", default=0)

    def do(action: LayerAction) -> None:
        number.set(number.get() + 1)
        turns.pass_on()
        labels.append((label.get(), f"{action.kind}{number.get()}"))

    turns = Alternation()
    turns.run(actions("FBFB"), do, phase, ignore)
    assert labels == [("forward", "F1"), ("backward", "B1"), ("forward", "F2"), ("backward", "B2")]
    assert number.get() == 0


# Which layers are side by side

BLOCKS = [f"block{i}" for i in range(4)]


def slots(schedule: str | Schedule, layers: list[str], zero: int = 1, parts: int = 8) -> Any:
    """The layers of each slot of the first rank, in order, if some `layers` communicate."""

    def of(comm: Communicator) -> list[list[str]]:
        mesh = Mesh(comm, pipe=2, data=1)
        model = gpt(num_layers=4, hidden=6, num_heads=2, context=CONTEXT, mesh=mesh)
        for name in layers:
            model.layers[name].comm_axes = ("pipe",)
        recipe, sharding = Recipe(num_micro_batches=parts), Sharding.zero(zero)
        return Trainer(mesh, model, recipe, sharding=sharding, schedule=schedule).actions

    found = collectives.run(of, size=2)[0]
    numbers = dict.fromkeys(each.slot for each in found if each.slot is not None)
    computing = [each for each in found if isinstance(each, LayerForward | LayerBackward)]
    return [[f"{a.kind} {a.layer}" for a in computing if a.slot == n] for n in numbers]


def test_layers_that_communicate_are_side_by_side() -> None:
    """Those before them are done first."""
    first = ["F embedding", "F block0", "F block1", "B loss", "B head", "B block3", "B block2"]
    assert first in slots("dualpipe", ["block1", "block3"])
    second = ["F embedding", "F block0", "B loss", "B head", "B block3", "F block1", "B block2"]
    assert second in slots("dualpipe", BLOCKS)


def test_where_no_layer_can_wait_there_are_no_turns() -> None:
    """Or all wait for parts of parameters or gradients."""
    assert slots("dualpipe", BLOCKS) and slots("dualpipe-v", BLOCKS)
    assert slots("dualpipe", []) == slots("1f1b", BLOCKS) == []
    assert slots("dualpipe", BLOCKS, zero=2) == slots("dualpipe", BLOCKS, zero=3) == []


def test_two_micro_batches_in_the_same_layers_take_no_turns() -> None:
    rows = ["0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    schedule = Schedule.of("mine", [[parse(word) for word in row.split()] for row in rows])
    assert slots(schedule, BLOCKS, parts=3) == []
