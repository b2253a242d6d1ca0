"""The registry of algorithms, and the decorator that adds the built-in ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from collectives.algorithms.algorithm import Algorithm
from collectives.algorithms.formulas import Counted, ForEvenHosts, Formula
from collectives.schedule import SPECS, Round

Function = TypeVar("Function", bound=Callable[..., Iterator[Round]])

REGISTRY: dict[str, dict[str, Algorithm]] = {collective: {} for collective in SPECS}


COSTS = (
    "rounds",
    "startups",
    "messages",
    "max_bytes_per_rank",
    "total_bytes",
    "critical_bytes",
    "reduction_bytes",
)


# The costs that depend on how the ranks of unequal hosts divide their work.
BY_HOST = ("startups", "messages", "max_bytes_per_rank", "critical_bytes", "reduction_bytes")


def algorithm(
    *,
    rounds: str,
    max_bytes_per_rank: str,
    reduction_bytes: str = "0",
    pieces: str = "1",
    for_even_hosts: Sequence[str] = (),
    **more: Any,
) -> Callable[[Function], Function]:
    """Add a function to the registry, under the collective of its file and its own name.

    Every formula is text; `more` has other costs and promises of an `Algorithm`.  By default, a
    rank sends and receives one message in each round, and the same rank is the busiest in all
    rounds.  `for_even_hosts` names the costs that are counted if hosts have different numbers of
    ranks.
    """
    options = more.get("options", {})
    costs = {"rounds": rounds, "startups": rounds, "reduction_bytes": reduction_bytes}
    costs |= {"max_bytes_per_rank": max_bytes_per_rank, "critical_bytes": max_bytes_per_rank}
    costs |= {name: more.pop(name) for name in COSTS if name in more}
    formulas: dict[str, Any] = {
        name: Formula(text, options, is_cost=True) for name, text in costs.items()
    }
    bounds = {"pieces": pieces, "scratch_bytes": more.pop("scratch_bytes")}
    formulas |= {name: Formula(text, options) for name, text in bounds.items()}

    def decorate(function: Function) -> Function:
        collective = _collective_of(function)
        for name in for_even_hosts:
            counted = Counted(name, collective, function, options, formulas["pieces"])
            formulas[name] = ForEvenHosts(formulas[name], counted)
        add(Algorithm(collective, function.__name__, function, **formulas, **more))
        return function

    return decorate


def _collective_of(function: Callable[..., Any]) -> str:
    """Return the collective of a built-in algorithm, from the name of its file."""
    return function.__module__.rpartition(".")[2]


_generation = 0
_ADDING = threading.Lock()


class Cache(Protocol):
    """A cache whose keys contain names of algorithms."""

    def forget(self) -> object:
        """Forget all entries."""


_CACHES: WeakSet[Cache] = WeakSet()


def watch(cache: Cache) -> None:
    """Clear a cache at every registration, as long as it exists."""
    with _ADDING:
        _CACHES.add(cache)


def generation() -> int:
    """Return a number that grows with every registration.

    A name can be registered again, so the keys of a cache contain this number besides names.
    """
    return _generation


def add(entry: Algorithm) -> None:
    """Add an algorithm to the registry; it replaces one of the same name."""
    global _generation
    with _ADDING:
        REGISTRY[entry.collective][entry.name] = entry
        _generation += 1  # last, so that a reader of the new number finds the new algorithm
        caches = list(_CACHES)
    for cache in caches:
        cache.forget()


def costs_of(function: Callable[..., Iterator[Round]], **other: Any) -> dict[str, Any]:
    """Return the formulas, the restriction and the options of an algorithm, with changes.

    A dual has the same rounds, messages and bytes; its reduction bytes must be given.
    """
    entry = REGISTRY[_collective_of(function)][function.__name__]
    shared = (*(name for name in COSTS if name != "reduction_bytes"), "pieces")
    texts = {key: str(getattr(entry, key)) for key in shared}
    by_host = [key for key in COSTS if isinstance(getattr(entry, key), ForEvenHosts)]
    promises = {"ranks": entry.ranks, "options": entry.options, "for_even_hosts": by_host}
    return {**texts, **promises, **other}
