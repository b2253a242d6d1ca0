"""A machine in JSON: the `Machine` that `ring bench tune` has measured, and facts about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from collectives.selection.fields import fields, items, seconds, shown, texts
from collectives.simulation import LINK_CLASSES, Link, Machine

_LIMIT, _IS_RENDEZVOUS = "up_to_bytes", "is_rendezvous"


class Fitted(NamedTuple):
    """A machine, and `facts`: texts that describe its measurement."""

    facts: Mapping[str, str]
    machine: Machine


def as_json(fitted: Fitted) -> dict[str, Any]:
    """Return a fitted machine as values of JSON."""
    facts, machine = fitted
    links = {
        name: [link._asdict() | {_LIMIT: _finite(link.up_to_bytes)} for link in of_class]
        for name, of_class in machine.links.items()
    }
    return {"facts": dict(facts), **machine._asdict(), "links": links}


def _finite(limit: float) -> int | None:
    return None if limit == math.inf else int(limit)


def from_json(value: object, place: str) -> Fitted:
    """Return the machine in values of `as_json`.

    Raises ValueError, with the place of an error.
    """
    data = fields(value, place, ("facts", *Machine._fields))
    links = fields(data["links"], f"{place}.links")
    if not links or not set(links) <= set(LINK_CLASSES):
        raise ValueError(f"{place}.links must have some of {', '.join(LINK_CLASSES)}")
    rates = {
        name: seconds(data[name], f"{place}.{name}") for name in Machine._fields if name != "links"
    }
    by_class = {name: _links(of_class, f"{place}.links.{name}") for name, of_class in links.items()}
    return Fitted(texts(data["facts"], f"{place}.facts"), Machine(by_class, **rates))


def _links(value: object, place: str) -> tuple[Link, ...]:
    links = tuple(
        _link(entry, f"{place}[{number}]")
        for number, entry in enumerate(items(value, place, "links"))
    )
    limits = [link.up_to_bytes for link in links]
    if limits != sorted(set(limits)) or limits[-1] != math.inf:
        raise ValueError(f"{place}: {_LIMIT} must grow from link to link, and be null in the last")
    return links


def _link(value: object, place: str) -> Link:
    data = fields(value, place, Link._fields)
    limit, is_rendezvous = data[_LIMIT], data[_IS_RENDEZVOUS]
    if limit is not None and (type(limit) is not int or limit < 0):
        raise ValueError(f"{place}.{_LIMIT} must be a number of bytes or null, not {shown(limit)}")
    if not isinstance(is_rendezvous, bool):
        raise ValueError(
            f"{place}.{_IS_RENDEZVOUS} must be true or false, not {shown(is_rendezvous)}"
        )
    rates = {
        name: seconds(rate, f"{place}.{name}")
        for name, rate in data.items()
        if name not in (_LIMIT, _IS_RENDEZVOUS)
    }
    return Link(math.inf if limit is None else limit, is_rendezvous=is_rendezvous, **rates)
