"""Fingerprints: a rank's description of a call, and sentences that say how ranks differ.

A fingerprint fits in a message of fixed size.  `checked.py` exchanges these messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple


class Fingerprint(NamedTuple):
    """A call as one rank sees it.  All values are text; an empty one matches any other.

    Attributes
    ----------
    out : str
        Whether a broadcast or scatter has one; without it a header is sent first.
    blocking : str
        Whether the call itself waits; messages of blocking calls have another tag.
    mode : str
        What is checked.
    call : str
        The number of the call.
    bad_value : str
        The first value that is not finite.
    place, num_calls : str
        The line of the program, and the number of calls so far, which are reported but not
        compared.
    """

    collective: str
    dtype: str = ""
    counts: str = ""
    op: str = ""
    root: str = ""
    algorithm: str = ""
    in_place: str = ""
    layout: str = ""
    out: str = ""
    blocking: str = ""
    mode: str = ""
    call: str = ""
    bad_value: str = ""
    place: str = ""
    num_calls: str = ""


# Bytes of each in a message.
_LENGTHS = {
    "collective": 40,
    "dtype": 48,
    "counts": 64,
    "op": 48,
    "root": 12,
    "algorithm": 64,
    "in_place": 8,
    "layout": 56,
    "out": 12,
    "blocking": 4,
    "mode": 8,
    "call": 40,
    "bad_value": 48,
    "place": 48,
    "num_calls": 12,
}
NUM_BYTES = sum(_LENGTHS.values())
_NOT_COMPARED = ("place", "num_calls")

DIGEST_BYTES = 16
_WORD = 2**64


class Digest(NamedTuple):
    """Two words that represent everything compared of a call except its number."""

    first: int
    second: int

    def numbered(self, number: int) -> Digest:
        """Return the digest of the call with this number."""
        return Digest((self.first + number) % _WORD, self.second)


BAD_VALUE = Digest(
    _WORD - 1, _WORD - 1
)  # of a call whose input or result has a value that is not finite

_SLOTS = {
    field: slice(end - length, end)
    for (field, length), end in zip(_LENGTHS.items(), accumulate(_LENGTHS.values()), strict=True)
}

_COMPARED = [field for field in _LENGTHS if field not in ("bad_value", *_NOT_COMPARED)]
_DECIDE_ALGORITHM = ("dtype", "counts", "op", "layout")
_NUM_DIGITS, _NUM_LAST = 12, 10
_MAX_GROUPS, _MAX_SPANS = 4, 8


# Messages


def encode(fingerprint: Fingerprint) -> bytes:
    """Return the message that contains a fingerprint."""
    message = bytearray(NUM_BYTES)
    for field, value in zip(_LENGTHS, fingerprint, strict=True):
        put(message, field, value)
    return bytes(message)


def digest(fingerprint: Fingerprint) -> Digest:
    """Return the digest of a fingerprint; equal if all compared fields are equal."""
    compared = "\0".join(getattr(fingerprint, field) for field in _COMPARED)
    hashed = blake2b(compared.encode(), digest_size=DIGEST_BYTES).digest()
    return Digest(*(int.from_bytes(half, "little") for half in (hashed[:8], hashed[8:])))


def put(message: bytearray, field: str, value: str) -> None:
    """Write one field of a message; a long value is replaced by its ends and a digest."""
    length = _LENGTHS[field]
    data = value.encode()
    if len(data) > length:
        digest = blake2b(data, digest_size=_NUM_DIGITS // 2).hexdigest()
        first = data[: length - _NUM_DIGITS - _NUM_LAST - 2]
        data = b"%b~%b~%b" % (first, digest.encode(), data[-_NUM_LAST:])
    message[_SLOTS[field]] = data.ljust(length, b"\0")


def decode(message: bytes) -> Fingerprint:
    """Return the fingerprint in a message."""
    return Fingerprint(
        *(message[slot].rstrip(b"\0").decode(errors="replace") for slot in _SLOTS.values())
    )


# Sentences


def difference(ranks: Sequence[Fingerprint]) -> str | None:
    """Return a sentence that says how the calls of the ranks differ; None if they agree."""
    fields = _differing(ranks)
    if not fields:
        return None
    groups = _groups(ranks, fields)
    rest = len(groups) - _MAX_GROUPS
    shown = groups if rest <= 0 else [*groups[: _MAX_GROUPS - 1], groups[-1]]
    said = [_group_text(ranks, group, fields, not number) for number, group in enumerate(shown)]
    if rest > 0:
        said.append(f"and {sum(map(len, groups[_MAX_GROUPS - 1 : -1]))} other ranks differ too")
    return f"{', '.join(said)}{_call_and_place(ranks)}"


def not_finite(ranks: Sequence[Fingerprint], verb: str, preposition: str) -> str | None:
    """Return a sentence that names the ranks with values that are not finite, or None."""
    bad_value = [(number, rank.bad_value) for number, rank in enumerate(ranks) if rank.bad_value]
    if not bad_value:
        return None
    listed = ", ".join(f"rank {number} {verb} {what}" for number, what in bad_value[:_MAX_GROUPS])
    more = len(bad_value) - _MAX_GROUPS
    and_more = f", and so do {more} other ranks," if more > 0 else ""
    return f"{listed}{and_more} {preposition} {ranks[0].collective}{_call_and_place(ranks)}"


def _differing(ranks: Sequence[Fingerprint]) -> list[str]:
    """Return the fields to report, without fields that differ only because another one does."""
    differing = [field for field in _COMPARED if len(_values(ranks, field)) > 1]
    if "collective" in differing:
        return ["collective"]
    if any(field in differing for field in _DECIDE_ALGORITHM):
        return [field for field in differing if field != "algorithm"]
    return differing


def _values(ranks: Sequence[Fingerprint], field: str) -> list[str]:
    """Return the distinct values of a field, in rank order."""
    return list(dict.fromkeys(filter(None, (getattr(rank, field) for rank in ranks))))


def _groups(ranks: Sequence[Fingerprint], fields: Sequence[str]) -> list[list[int]]:
    """Return groups of ranks with equal values in these fields, the largest group last.

    Among equally large groups the one with the lowest rank comes last.  Ranks without any of these
    values are in no group.
    """
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, rank in enumerate(ranks):
        alike.setdefault(tuple(getattr(rank, field) for field in fields), []).append(number)
    groups = [group for values, group in alike.items() if any(values)]
    return sorted(groups, key=lambda group: (len(group), -group[0]))


def _group_text(
    ranks: Sequence[Fingerprint], group: Sequence[int], fields: Sequence[str], is_first: bool
) -> str:
    """Return the text for a group of ranks; the first group's text names the collective."""
    one = ranks[group[0]]
    given = [
        (field, getattr(one, field)) for field in fields if field not in ("collective", "call")
    ]
    text = ", ".join(f"{field}={value}" for field, value in given if value)
    if fields == ["collective"]:
        text = one.collective
    elif is_first:
        text = f"{one.collective}({text})" if text else one.collective
    words = [
        _rank_list(group),
        "called" * is_first,
        text,
        f"in call {one.call}" * ("call" in fields),
    ]
    if len(_values(ranks, "place")) > 1:
        places = _values([ranks[number] for number in group], "place")
        words.append(f"from {' and '.join(places[:2])}{' and elsewhere' * (len(places) > 2)}")
    return " ".join(filter(None, words))


def _call_and_place(ranks: Sequence[Fingerprint]) -> str:
    """Return the number of the call and the line of the program, in parentheses.

    A number or a line that differs among ranks is left out.
    """
    calls, places = _values(ranks, "call"), _values(ranks, "place")
    shared = [f"call {calls[0]}"] * (len(calls) == 1) + [f"from {places[0]}"] * (len(places) == 1)
    return f" ({', '.join(shared)})" if shared else ""


def _rank_list(group: Sequence[int]) -> str:
    """Return ranks as text: "rank 2", "ranks 0, 1, 3"; of many ranks "ranks 0-6, 9"."""
    if len(group) == 1:
        return f"rank {group[0]}"
    if len(group) <= _MAX_SPANS:
        return f"ranks {', '.join(map(str, group))}"
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in _spans(group)]
    if len(spans) > _MAX_SPANS:
        spans = [*spans[:_MAX_SPANS], f"... ({len(group)} in all)"]
    return f"ranks {', '.join(spans)}"


def _spans(group: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last number of each sequence of consecutive numbers."""
    first = last = group[0]
    for number in group[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last
