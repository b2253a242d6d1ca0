"""What a rank tells of its call, and the sentences on how ranks differ."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.runtime import fingerprint
from collectives.runtime.fingerprint import BAD_VALUE, NUM_BYTES, Fingerprint

SUM = Fingerprint(
    "all_reduce",
    dtype="float32",
    op="sum",
    algorithm="ring",
    in_place="no",
    layout="(3, 4)",
    call="17",
    place="train.py:42",
    num_calls="17",
)


def ranks(size: int, **others: dict[str, Any]) -> list[Fingerprint]:
    """All alike, except for what is given as r2={...}."""
    return [SUM._replace(**others.get(f"r{rank}", {})) for rank in range(size)]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (
            ranks(4, r2={"op": "prod"}),
            "rank 2 called all_reduce(op=prod), ranks 0, 1, 3 op=sum (call 17, from train.py:42)",
        ),
        # Of equally many the one with the lowest rank is taken for right.
        (
            ranks(2, r1={"dtype": "int32"}),
            "rank 1 called all_reduce(dtype=int32), rank 0 dtype=float32 "
            "(call 17, from train.py:42)",
        ),
        # What else differs follows from that.
        (
            ranks(3, r0={"collective": "scan", "op": "max", "place": "other.py:3"}),
            "rank 0 called scan from other.py:3, ranks 1, 2 all_reduce from train.py:42 (call 17)",
        ),
        (
            ranks(3, r0={"layout": "(6,)", "algorithm": "swing"}),
            "rank 0 called all_reduce(layout=(6,)), ranks 1, 2 layout=(3, 4) "
            "(call 17, from train.py:42)",
        ),
        (
            ranks(3, r0={"in_place": "yes", "algorithm": "swing"}),
            "rank 0 called all_reduce(algorithm=swing, in_place=yes), "
            "ranks 1, 2 algorithm=ring, in_place=no (call 17, from train.py:42)",
        ),
        (
            ranks(3, r1={"call": "3.2"}),
            "rank 1 called all_reduce in call 3.2, ranks 0, 2 in call 17 (from train.py:42)",
        ),
        (
            ranks(5, r1={"op": "max"}, r3={"op": "prod"}, r4={"op": "max"}),
            "rank 3 called all_reduce(op=prod), ranks 1, 4 op=max, ranks 0, 2 op=sum "
            "(call 17, from train.py:42)",
        ),
    ],
)
def test_the_few_come_before_the_many(given: list[Fingerprint], wanted: str) -> None:
    assert fingerprint.difference(given) == wanted


def test_ranks_that_are_alike_do_not_differ() -> None:
    assert fingerprint.difference(ranks(5)) is None
    assert fingerprint.difference(ranks(1)) is None


@pytest.mark.parametrize("field", [field for field in Fingerprint._fields if field != "collective"])
def test_what_a_rank_does_not_know_goes_with_anything(field: str) -> None:
    assert fingerprint.difference(ranks(3, r1={field: ""}, r2={field: ""})) is None


@pytest.mark.parametrize("field", Fingerprint._fields)
def test_every_field_but_the_told_ones_is_compared(field: str) -> None:
    is_told_only = field in ("bad_value", "place", "num_calls")
    said = fingerprint.difference(ranks(3, r1={field: "9"}, r2={field: "8"}))
    assert (said is None) == is_told_only


def test_lines_that_differ_are_said_with_their_ranks() -> None:
    given = ranks(4, r0={"op": "max", "place": "a.py:1"}, r2={"place": "a.py:2"})
    assert fingerprint.difference(given) == (
        "rank 0 called all_reduce(op=max) from a.py:1, "
        "ranks 1, 2, 3 op=sum from train.py:42 and a.py:2 (call 17)"
    )


def test_of_many_ranks_few_are_listed() -> None:
    thousand = ranks(1000, **{f"r{rank}": {"root": str(rank)} for rank in range(20, 40)})
    given = [rank._replace(root=rank.root or "7") for rank in thousand]
    said = fingerprint.difference(given)
    assert said is not None and said.startswith(
        "rank 39 called all_reduce(root=39), rank 38 root=38, rank 37 root=37, "
        "ranks 0-19, 40-999 root=7, and 17 other ranks differ too (call 17"
    )
    odd = ranks(100, **{f"r{rank}": {"op": "max"} for rank in range(1, 100, 2)})
    said = fingerprint.difference(odd)
    assert said is not None and "ranks 1, 3, 5, 7, 9, 11, 13, 15, ... (50 in all)" in said


def test_what_is_not_finite_is_listed() -> None:
    given = ranks(9, r1={"bad_value": "nan at [3]"}, r4={"bad_value": "inf at [0]"})
    assert fingerprint.not_finite(given, "brings", "to") == (
        "rank 1 brings nan at [3], rank 4 brings inf at [0] to all_reduce "
        "(call 17, from train.py:42)"
    )
    many = ranks(9, **{f"r{rank}": {"bad_value": "nan at [3]"} for rank in range(9)})
    said = fingerprint.not_finite(many, "brings", "to")
    assert said is not None and "rank 3 brings nan at [3], and so do 5 other ranks, to" in said
    assert fingerprint.not_finite(ranks(9), "brings", "to") is None


def test_a_message_has_a_fixed_length_and_comes_back() -> None:
    for each in (SUM, Fingerprint("barrier"), SUM._replace(op="größer")):
        message = fingerprint.encode(each)
        assert len(message) == NUM_BYTES == 512
        assert fingerprint.decode(message) == each


def test_what_is_too_long_keeps_its_ends_and_is_still_told_apart() -> None:
    tables = [str([[1, 2, 3 + i, 4] * 50, [7, 7]]) for i in range(2)]
    one, other = (SUM._replace(counts=table) for table in tables)
    messages = [fingerprint.encode(each) for each in (one, other, one)]
    assert {len(message) for message in messages} == {NUM_BYTES}
    assert messages[0] == messages[2] != messages[1]
    found = fingerprint.decode(messages[0]).counts
    assert found.startswith("[[1, 2, 3, 4, 1,") and found.endswith("[7, 7]]")
    decoded = [fingerprint.decode(message) for message in messages]
    said = fingerprint.difference(decoded)
    assert said is not None and said.startswith("rank 1 called all_reduce(counts=[[1, 2, 4")


def test_fields_that_are_put_later_are_those_of_the_message() -> None:
    message = bytearray(fingerprint.encode(SUM._replace(op="multiply and much more", call="999")))
    fingerprint.put(message, "op", SUM.op)
    fingerprint.put(message, "call", SUM.call)
    assert bytes(message) == fingerprint.encode(SUM)


@pytest.mark.parametrize("field", [name for name in Fingerprint._fields if name != "bad_value"])
def test_digests_differ_where_what_is_compared_differs(field: str) -> None:
    other = fingerprint.digest(SUM._replace(**{field: "other"}))
    assert (other == fingerprint.digest(SUM)) == (field in ("place", "num_calls"))


def test_digests_differ_by_the_number_of_the_call() -> None:
    digest = fingerprint.digest(SUM)
    numbered = [digest.numbered(number) for number in (0, 1, 2**40)]
    assert numbered[0] == digest and len(set(numbered)) == 3
    assert BAD_VALUE.numbered(1).first < 2**64
