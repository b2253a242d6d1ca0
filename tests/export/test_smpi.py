"""Traces for SimGrid's SMPI, replayed: nobody waits forever, and the bytes are the predicted."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from collectives.export import Call, platform, smpi
from tests.export import calls
from tests.export.smpi_reader import Replay

RING = list(smpi.lines(Call("all_reduce", 4, 400, "ring").tasks(calls.MACHINE)))


@pytest.mark.parametrize("collective", calls.COLLECTIVES)
def test_the_replay_ends_and_has_the_predicted_bytes(collective: str) -> None:
    for call in calls.calls(collective):
        sent = Replay(smpi.lines(call.tasks(calls.MACHINE))).run()
        assert calls.summed(sent) == calls.predicted(call), call


def test_a_rank_posts_waits_and_computes_in_the_order_of_its_program() -> None:
    assert RING[:7] == [
        "0 init",
        "0 compute 100",
        "0 irecv 3 0 100",
        "0 isend 1 0 100",
        "0 waitall",
        "0 compute 200",
        "0 irecv 3 1 100",
    ]


def test_a_rank_waits_only_for_what_it_needs() -> None:
    """A large reduction has several lanes, whose messages are in flight at the same time."""
    lines = list(smpi.lines(Call("all_reduce", 2, 4 << 20, "ring").tasks(calls.MACHINE)))
    waits = [line for line in lines if line.startswith("0 wait ")]
    assert waits[:2] == ["0 wait 1 0 0", "0 wait 0 1 0"]
    Replay(lines).run()


def test_the_replay_finds_a_missing_send_and_another_size() -> None:
    with pytest.raises(AssertionError, match=r"wait forever: \{0: 'waitall'"):
        Replay(line for line in RING if line != "3 isend 0 0 100").run()
    with pytest.raises(AssertionError, match="99, 100"):
        Replay(line.replace("3 isend 0 0 100", "3 isend 0 0 99") for line in RING).run()


def test_a_platform_has_the_numbers_of_the_machine() -> None:
    root = ElementTree.fromstring(platform(8, calls.MACHINE))
    cluster = root.find("cluster")
    assert cluster is not None
    assert cluster.get("radical") == "0-7" and cluster.get("bw") == "1000000000Bps"
    assert cluster.get("lat") == "1e-06s"  # of each of the two links between hosts
    config = {prop.get("id"): prop.get("value") for prop in root.iter("prop")}
    assert config["smpi/os"] == "0:5e-07:0;65:5e-07:0"
    assert config["smpi/async-small-thresh"] == config["smpi/send-is-detached-thresh"] == "64"
