"""Decisions: read strictly, and what they say for any number of ranks and bytes."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from typing import Any

import pytest

from collectives import Operator, Topology
from collectives.selection import select
from collectives.selection.decisions import Decisions, Measured, Ranks, Row, size_range
from collectives.selection.machine_file import Fitted
from collectives.simulation import Link, Machine

MATMUL = Operator.from_function(lambda left, right: left @ right, name="matmul")


def measured(**tables: list[dict[str, Any]]) -> dict[str, Any]:
    return {"facts": {"mpi": "MPI 5"}, "tables": tables}


def row(up_to: int | None, *best: str) -> dict[str, Any]:
    return {"up_to": up_to, "best": list(best)}


def read(tables: dict[str, Any]) -> Decisions:
    return Decisions.from_json(json.dumps({"machine": None, "measured": tables}))


TABLE = [row(100, "bruck( radix = 4 )"), row(2000, "neighbour_exchange", "ring"), row(None, "ring")]


def test_what_is_read_is_what_was_written() -> None:
    decisions = read({"4": measured(all_gather=TABLE), "2": measured()})
    rows = (
        Row(100, ("bruck(radix=4)",)),
        Row(2000, ("neighbour_exchange", "ring")),
        Row(math.inf, ("ring",)),
    )
    four = Measured({"mpi": "MPI 5"}, {"all_gather": rows})
    assert decisions.measured == {Ranks(4): four, Ranks(2): four._replace(tables={})}
    text = decisions.to_json()
    assert Decisions.from_json(text).measured == decisions.measured
    assert Decisions.from_json(text.encode()).to_json() == text
    assert text.index('"2"') < text.index('"4"'), "in the order of the ranks"


def changed(place: str, value: Any) -> str:
    """Good decisions with what is at a place replaced, or put there."""
    data: Any = {"machine": None, "measured": {"4": measured(all_gather=deepcopy(TABLE))}}
    *path, last = [int(key) if key.isdigit() and key != "4" else key for key in place.split(".")]
    parent = data
    for key in path:
        parent = parent[key]
    parent[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        ("more", 1, "decisions must have machine, measured, and nothing else"),
        ("measured", [], "measured must be an object"),
        ("measured.four", {}, "measured: 'four' is not a number of ranks"),
        ("measured.0", {}, "measured: '0' is not a number of ranks"),
        ("measured.4 on 1 hosts", {}, "measured: '4 on 1 hosts' is not a number of ranks"),
        ("measured.4 on 0 hosts", {}, "measured: '4 on 0 hosts' is not a number of ranks"),
        ("measured.4.when", "", "measured.4 must have facts, tables, and nothing else"),
        ("measured.4.facts", None, "measured.4.facts must be an object"),
        ("measured.4.facts.mpi", 5, "measured.4.facts.mpi must be a text, not 5"),
        ("measured.4.tables.allgather", TABLE, "measured.4.tables.allgather: there is no such"),
        ("measured.4.tables.all_gather", [], "tables.all_gather must be a list of rows, and not"),
        ("measured.4.tables.all_gather.1", 7, r"all_gather\[1\] must be an object"),
        ("measured.4.tables.all_gather.1.up_to", 100, "all_gather: up_to must grow from row to"),
        ("measured.4.tables.all_gather.1.up_to", 99, "all_gather: up_to must grow from row to row"),
        ("measured.4.tables.all_gather.1.up_to", None, "all_gather: up_to must grow from row to"),
        ("measured.4.tables.all_gather.2.up_to", 9999, "all_gather: .* be null in the last"),
        ("measured.4.tables.all_gather.0.up_to", -1, r"\[0\].up_to must be a number of bytes or"),
        ("measured.4.tables.all_gather.0.up_to", 1.5, r"\[0\].up_to must be a number of bytes or"),
        ("measured.4.tables.all_gather.0.best", "ring", r"\[0\].best must be a list of algorithms"),
        ("measured.4.tables.all_gather.0.best", [], r"\[0\].best must be a list of algorithms"),
        ("measured.4.tables.all_gather.0.best", [2], r"\[0\].best: algorithm must be a name"),
        ("measured.4.tables.all_gather.0.best", ["rign"], r"\[0\].best: unknown algorithm 'rign'"),
        ("measured.4.tables.all_gather.0.best", ["ring(radix=2)"], r"\[0\].best: .* no option"),
        (
            "measured.4.tables.all_reduce",
            [row(None, "invariant(shards=4)")],
            r"\[0\].best: all_reduce by invariant\(shards=4\) needs shards=4, and an x with",
        ),
        (
            "measured.4.tables.broadcast",
            [row(None, f"pipeline(segments={10**9})")],
            r"broadcast\[0\].best: .* segments is at most 65536",
        ),
        (
            "measured.4.tables.broadcast",
            [row(None, "pipeline(segments=-1)")],
            r"broadcast\[0\].best: .* segments is at least 1",
        ),
        (
            "measured.4.tables.broadcast",
            [row(None, "hierarchical(per_host=0)")],
            r"broadcast\[0\].best: .* per_host is at least 1",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(place: str, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Decisions.from_json(changed(place, value))


def test_what_was_measured_on_devices_is_apart() -> None:
    """Neither says anything of the other, and older files have none of it."""
    host, devices = measured(all_gather=[row(None, "ring")]), [row(None, "bruck(radix=4)", "ring")]
    text = json.dumps(
        {
            "machine": None,
            "measured": {"4": host, "8": host},
            "measured_on_devices": {"8": measured(all_gather=devices)},
        }
    )
    decisions = Decisions.from_json(text)
    assert Decisions.from_json(decisions.to_json()).on_devices == decisions.on_devices

    def chosen(decisions: Decisions | None, *, on_device: bool) -> tuple[str, str]:
        call = "all_gather", None, 4, 2**20, None, decisions
        choice = select.choose(*call, on_device=on_device)
        return choice.label, choice.reason

    assert chosen(decisions, on_device=False) == ("ring", "table measured on 4 ranks: every size")
    where = "table measured on devices of 8 ranks, the nearest to 4: every size"
    assert chosen(decisions, on_device=True) == ("bruck(radix=4)", where)
    older = read({"4": host})
    assert older.on_devices == {}
    assert chosen(older, on_device=True) == chosen(None, on_device=True)
    assert chosen(older, on_device=False)[0] == "ring"


def test_one_more_measurement_on_devices_changes_nothing_else() -> None:
    rows = (Row(math.inf, ("ring",)),)
    before = read({"4": measured(all_gather=TABLE)})
    after = before.including_devices(Ranks(4), Measured({}, {"all_gather": rows}))
    again = after.including_devices(Ranks(4), Measured({"mpi": "MPI 6"}, {"all_reduce": rows}))
    assert (after.measured, again.fitted) == (before.measured, before.fitted)
    tables = {"all_gather": rows, "all_reduce": rows}
    assert again.on_devices == {Ranks(4): Measured({"mpi": "MPI 6"}, tables)}
    assert again.including(Ranks(2), Measured({}, {})).on_devices == again.on_devices


def test_segments_that_were_not_measured_on_devices_are_not_added() -> None:
    labels = {"chain(chains=3)": 1, "chain(chains=3,segments=8)": 8}
    for text, segments in labels.items():
        on_devices = measured(broadcast=[row(None, text)])
        both = {"machine": None, "measured": {}, "measured_on_devices": {"4": on_devices}}
        decisions = Decisions.from_json(json.dumps(both))
        choice = select.choose("broadcast", None, 4, 2**20, None, decisions, on_device=True)
        assert (choice.options, choice.segments) == ({"chains": 3, "segments": segments}, 1)


@pytest.mark.parametrize("place", ["measured_on_devices", "measured_on_device"])
def test_what_is_wrong_of_devices_is_refused_with_its_place(place: str) -> None:
    data = {"machine": None, "measured": {}, place: {"4 ranks": measured()}}
    sentence = {
        "measured_on_devices": "measured_on_devices: '4 ranks' is not a number of ranks",
        "measured_on_device": "decisions must have machine, measured, and nothing else",
    }[place]
    with pytest.raises(ValueError, match=sentence):
        Decisions.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe\xff", "[" * 200_000])
def test_what_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="decisions are not JSON"):
        Decisions.from_json(text)


def label(decisions: Decisions, size: int, num_bytes: int, collective: str = "all_gather") -> str:
    return select.choose(collective, None, size, num_bytes, None, decisions).label


def test_a_row_holds_up_to_its_size() -> None:
    decisions = read({"4": measured(all_gather=TABLE)})
    labels = [label(decisions, 4, n) for n in (0, 100, 101, 2000, 2001, 2**40)]
    assert labels == ["bruck(radix=4)"] * 2 + ["neighbour_exchange"] * 2 + ["ring"] * 2
    assert label(decisions, 4, 8, "all_reduce") == select.choose("all_reduce", None, 4, 8).label


def test_options_that_are_not_given_follow_from_the_size() -> None:
    decisions = read({"4": measured(broadcast=[row(None, "chain(chains=3)")])})
    choice = select.choose("broadcast", None, 4, 2**20, None, decisions)
    assert choice.options == {"chains": 3, "segments": 4}


def test_the_nearest_number_of_ranks_stands_for_one_that_was_not_measured() -> None:
    names = {2: "ring", 8: "bruck", 64: "direct"}
    tables = {str(p): measured(all_gather=[row(None, name)]) for p, name in names.items()}
    sizes = {1: 2, 3: 2, 4: 2, 5: 8, 8: 8, 22: 8, 23: 64, 1000: 64}
    for size, nearest in sizes.items():
        assert label(read(tables), size, 8) == names[nearest], size


def test_what_cannot_serve_gives_way_to_the_next_in_line() -> None:
    table = [row(100, "neighbour_exchange", "swing"), row(None, "neighbour_exchange", "bruck")]
    tables = {"4": measured(all_gather=table), "8": measured(all_gather=[row(None, "sparbit")])}
    assert label(read(tables), 4, 8) == "neighbour_exchange"
    assert label(read(tables), 5, 101) == "bruck", "the next of the row"
    assert label(read(tables), 5, 8) == "sparbit", "the next nearest number of ranks"
    del tables["8"]
    assert label(read(tables), 5, 8) == select.choose("all_gather", None, 5, 8).label


def test_an_algorithm_that_would_cut_into_too_many_pieces_gives_way_too() -> None:
    table = [row(None, "segmented_ring(segments=65536)", "swing")]
    decisions = read({"4": measured(all_reduce=table)})
    assert label(decisions, 4, 8, "all_reduce") == "segmented_ring(segments=65536)"
    assert label(decisions, 18, 8, "all_reduce") == "swing"  # 18 * 65536 pieces


def test_an_operator_that_needs_the_order_is_served_by_what_keeps_it() -> None:
    decisions = read({"4": measured(all_reduce=[row(None, "ring", "swing", "linear")])})
    assert label(decisions, 4, 8, "all_reduce") == "ring"
    choice = select.choose("all_reduce", None, 4, 8, MATMUL, decisions)
    assert choice.label == "linear" and choice.algorithm.is_ordered
    other = read({"4": measured(all_reduce=[row(None, "ring")])})
    built_in = select.choose("all_reduce", None, 4, 2**20, MATMUL)
    assert select.choose("all_reduce", None, 4, 2**20, MATMUL, other).label == built_in.label


def test_shards_that_no_call_has_cannot_be_chosen_however_the_decisions_were_made() -> None:
    row_of = Row(math.inf, ("invariant(shards=4)",))
    decisions = Decisions({Ranks(2): Measured({}, {"all_reduce": (row_of,)})})
    with pytest.raises(ValueError, match="needs shards=4, and an x with shards"):
        select.choose("all_reduce", None, 2, 8, None, decisions)
    assert select.choose("all_reduce", "invariant(shards=4)", 2, 8).options == {"shards": 4}


def test_a_named_algorithm_is_not_replaced() -> None:
    decisions = read({"4": measured(all_gather=TABLE)})
    assert select.choose("all_gather", "sparbit", 4, 8, None, decisions).label == "sparbit"


def test_the_reason_names_the_table() -> None:
    decisions = read({"4": measured(all_gather=TABLE)})

    def reason(size: int, num_bytes: int) -> str:
        return select.choose("all_gather", None, size, num_bytes, None, decisions).reason

    assert reason(4, 8) == "table measured on 4 ranks: up to 100 bytes"
    assert reason(4, 101) == "table measured on 4 ranks: above 100 and up to 2000 bytes"
    assert reason(5, 2001) == "table measured on 4 ranks, the nearest to 5: above 2000 bytes"


def test_what_was_measured_on_one_host_says_nothing_about_several() -> None:
    tables = {
        "8": "ring",
        "8 on 4 hosts": "bruck",
        "8 on 2 hosts": "direct",
        "64 on 4 hosts": "swing",
    }
    decisions = read({key: measured(all_gather=[row(None, name)]) for key, name in tables.items()})
    assert Decisions.from_json(decisions.to_json()).measured == decisions.measured

    def chosen(num_hosts: int, per_host: int) -> tuple[str, str]:
        size = num_hosts * per_host
        hosts = Topology.consecutive(size, per_host)
        return select.choose("all_gather", None, size, 8, None, decisions, hosts)[2:4]

    assert chosen(1, 8) == ("ring", "table measured on 8 ranks: every size")
    assert chosen(1, 64)[0] == "ring"
    assert chosen(4, 2) == ("bruck", "table measured on 8 ranks on 4 hosts: every size")
    assert chosen(2, 4)[0] == "direct"
    assert chosen(8, 2) == (
        "bruck",
        "table measured on 8 ranks on 4 hosts, the nearest to 16 on 8 hosts: every size",
    )
    assert chosen(4, 16)[0] == "swing"
    alone = read({"8": measured(all_gather=[row(None, "ring")])})
    hosts = Topology.consecutive(8, 2)
    reason = select.choose("all_gather", None, 8, 8, None, alone, hosts).reason
    assert reason == "built-in rule on 4 hosts: up to 1048576 bytes"


def test_an_extent_without_limits_is_every_size() -> None:
    assert size_range(math.inf, 8, [math.inf]) == "every size"
    assert size_range(math.inf, 8, [8, math.inf]) == "every size", "8 bytes are not above 8"
    assert size_range(math.inf, 9, [8, math.inf]) == "above 8 bytes"


def test_a_later_measurement_keeps_the_machine_and_a_machine_the_measurements() -> None:
    fitted = Fitted({"mpi": "MPI 6"}, Machine({"same_host": (Link(),)}))
    decisions = read({"4": measured(all_gather=TABLE)}).with_machine(fitted)
    later = decisions.including(Ranks(2), decisions.measured[Ranks(4)])
    assert later.fitted == fitted and later.measured[Ranks(4)] == decisions.measured[Ranks(4)]
    again = Decisions.from_json(later.to_json())
    assert again.fitted == fitted and again.measured == later.measured


def test_a_later_measurement_replaces_its_own_tables_only() -> None:
    known = read({"2": measured(all_gather=TABLE, barrier=[row(None, "tree")]), "4": measured()})
    later = read({"2": measured(barrier=[row(None, "dissemination")])}).measured[Ranks(2)]
    joined = known.including(Ranks(2), later._replace(facts={"mpi": "MPI 6"}))
    assert joined.measured[Ranks(2)].facts == {"mpi": "MPI 6"}
    assert (
        joined.measured[Ranks(2)].tables["all_gather"]
        == known.measured[Ranks(2)].tables["all_gather"]
    )
    assert joined.measured[Ranks(2)].tables["barrier"] == later.tables["barrier"]
    assert joined.measured[Ranks(4)] == known.measured[Ranks(4)]
    assert known.including(Ranks(3), later).measured[Ranks(3)] == later
