"""The file of a fitted machine: what is written can be read, and what is wrong is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from collectives.selection.decisions import Decisions
from collectives.selection.machine_file import Fitted, as_json, from_json
from collectives.simulation import Link, Machine

EAGER = Link(4056, 1e-7, 2e-11, 3e-7, 4e-8, 5e-10)
REST = Link(math.inf, 1e-6, 2e-11, 3e-6, 4e-7, 5e-11, is_rendezvous=True)
FITTED = Fitted(
    {"mpi": "MPI 5"},
    Machine({"same_host": (EAGER, REST), "other_host": (REST,)}, 1e-6, 2e-11, 3e-11),
)


def test_what_is_read_is_what_was_written() -> None:
    text = Decisions({}, FITTED).to_json()
    assert Decisions.from_json(text).fitted == FITTED
    assert '"latency_seconds"' in text and '"up_to_bytes": null' in text, "units are in the names"


def test_no_machine_is_null() -> None:
    text = Decisions({}).to_json()
    assert json.loads(text)["machine"] is None
    assert Decisions.from_json(text).fitted is None


def changed(place: str, value: Any) -> Any:
    """A good machine with what is at a place replaced, or put there."""
    data = json.loads(json.dumps(as_json(FITTED)))
    *path, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    parent = data
    for key in path:
        parent = parent[key]
    parent[last] = value
    return data


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        ("more", 1, "machine must have facts, links, call_seconds, .* and nothing else"),
        ("facts", None, "machine.facts must be an object"),
        ("facts.mpi", 5, "machine.facts.mpi must be a text, not 5"),
        ("call_seconds", -1, "machine.call_seconds must be a number of seconds, not -1"),
        ("copy_seconds_per_byte", True, "copy_seconds_per_byte must be a number .*, not True"),
        ("copy_seconds_per_byte", math.nan, "copy_seconds_per_byte must be a number .*, not nan"),
        ("combine_seconds_per_byte", 10**400, "combine_seconds_per_byte must be a number of"),
        ("links", {}, "machine.links must have some of same_host, other_host, island"),
        ("links.near", [], "machine.links must have some of same_host, other_host, island"),
        ("links.same_host", [], "machine.links.same_host must be a list of links, and not empty"),
        ("links.same_host.0", 7, r"machine.links.same_host\[0\] must be an object"),
        ("links.same_host.0.gap_seconds", "1", r"same_host\[0\].gap_seconds must be a number of"),
        ("links.same_host.0.is_rendezvous", 1, "is_rendezvous must be true or false, not 1"),
        ("links.same_host.0.up_to_bytes", 1.5, "up_to_bytes must be a number of bytes or null"),
        ("links.same_host.0.up_to_bytes", None, "same_host: up_to_bytes must grow from link to"),
        ("links.same_host.1.up_to_bytes", 9999, "same_host: .* be null in the last"),
        ("links.same_host.1.letters", {}, r"same_host\[1\] must have up_to_bytes, overhead_sec"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(place: str, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_json(changed(place, value), "machine")
