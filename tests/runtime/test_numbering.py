"""The tags of calls do not meet, and those of mixing communicators have a part of their own."""

from __future__ import annotations

import pytest

from collectives.runtime.numbering import Numbering

NUM_TAGS = 4096


def tags_of(numbering: Numbering) -> list[int]:
    """All tags of the calls with these numbers, and of messages of the user."""
    numbers = range(1, 301)
    own = [tag for n in numbers for tag in (numbering.async_tag(n), numbering.header_tag(n))]
    checks = [numbering.check_tag(numbering.next_check()) for _ in numbers]
    users = [numbering.user_tag(n) for n in numbers]
    return [*own, *checks, *users, numbering.blocking_tag, numbering.subgroup_tag]


@pytest.mark.parametrize("number", [None, 0, 300, 511, 10**9])
def test_no_two_messages_have_the_same_tag(number: int | None) -> None:
    numbering = Numbering(NUM_TAGS)
    if number is not None:
        numbering.mix(number)
    tags = tags_of(numbering)
    assert len(set(tags)) == len(tags) and min(tags) >= 0 and max(tags) < NUM_TAGS


def test_mixing_communicators_of_other_numbers_have_other_tags() -> None:
    one, other = Numbering(1 << 20), Numbering(1 << 20)
    one.mix(1)
    other.mix(2)
    assert not set(tags_of(one)) & set(tags_of(other))


def test_a_mixing_communicator_has_half_of_the_tags_of_the_user() -> None:
    numbering = Numbering(NUM_TAGS)
    numbering.mix(7)
    numbering.user_tag(511)
    with pytest.raises(ValueError, match="tag must be from 0 to 511, got 512"):
        numbering.user_tag(512)
