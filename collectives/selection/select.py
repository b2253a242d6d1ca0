"""Chooses the algorithm of a call, and says why; checks whether a named algorithm can run.

A caller names an algorithm as text, with optional options: "ring", "pipeline(segments=8)".  The
choice depends only on what all ranks know, so all ranks choose the same.  A named algorithm is
never replaced by another: it runs, or the call is refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import chain
from typing import Any

from collectives import algorithms
from collectives.algorithms import Algorithm, Option, registry
from collectives.arrays import Operator, validation
from collectives.programs import CountOfEachBlock, Counts, OwnCounts, num_lanes
from collectives.schedule import SPECS, Topology
from collectives.selection import cost
from collectives.selection.choice import Choice
from collectives.selection.decisions import Decisions, Ranks, size_range
from collectives.selection.labels import NamedAlgorithm, parse_default, parse_label
from collectives.selection.rules import Hosts, by_rules, rules
from collectives.simulation import Machine

SEGMENT_BYTES = 256 * 1024
_MAX_SEGMENTS = 256
# The default where a rank knows only its own counts, so that ranks cannot choose by size alike.
LOCAL_DEFAULTS = {"gather": "linear_bounded", "scatter": "linear_bounded", "all_to_all": "linear"}
# The sizes for which algorithms are priced; a call is priced as the next one.
_PRICED = {2**power for power in range(3, 29)}
_MAX_PROVED = 2**14  # pieces times ranks of a proof inside a call, which takes 0.3 s


def choose(
    collective: str,
    text: str | None,
    size: int,
    num_bytes: int,
    operator: Operator | None = None,
    decisions: Decisions | None = None,
    topology: Topology | None = None,
    itemsize: int = 1,
    on_device: bool = False,
) -> Choice:
    """Return the `Choice` of a call: its algorithm and options, and the reason.

    What was measured on so many ranks comes first, then the least time predicted on the fitted
    machine, then what was measured on the nearest number of ranks, then the built-in rules.

    Parameters
    ----------
    collective : str
        The name of the collective.
    text : str or None
        The algorithm that the caller names, such as "pipeline(segments=8)"; None: chosen by size.
    size : int
        The number of ranks.
    num_bytes : int
        The n of the formulas: bytes of the whole vector.
    operator : Operator, optional
        The operator of a reduction; one that does not commute needs an algorithm that keeps the
        order.
    decisions : Decisions, optional
        What was measured, which counts before the built-in rules.  None: only the rules.
    topology : Topology, optional
        The hosts of the ranks.  None: all are on one host.
    itemsize : int
        The bytes of an element.  More `segments` than a piece of the vector, or the mean block, has
        elements are not used: some would be empty.
    on_device : bool
        Whether the ranks read each other's arrays on GPUs.  What was measured there and the rules
        for them choose, without segments.  On several hosts it makes no difference.

    Returns
    -------
    Choice

    Raises
    ------
    TypeError, ValueError
        If there is no such algorithm, or if it cannot serve.

    Examples
    --------
    >>> import collectives
    >>> collectives.choose("all_reduce", None, size=4, num_bytes=1 << 20).label
    'ring'
    """
    if topology is not None and len(topology.host_of) != size:
        topology.check_size(size)
    if itemsize < 1:
        raise ValueError(f"an element has at least 1 byte, got itemsize={itemsize}")
    if text is not None:
        named = check(collective, text, size, operator)
        return _with_options(named, "named by the caller", size, num_bytes, topology, itemsize)
    hosts = _hosts(topology, size, on_device)
    if hosts.have_devices:
        decisions = None if decisions is None else decisions.of_devices
    is_free = operator is None or operator.is_commutative
    limits = _limits(collective, decisions, hosts)
    limit = limits[bisect_left(limits, num_bytes)]
    key = collective, size, limit, is_free, decisions, topology, hosts
    named, reason = _default(*key, registry.generation())
    choice = _with_options(named, reason, size, num_bytes, topology, itemsize)
    return _in_one_piece(choice, named) if hosts.have_devices else choice


def _in_one_piece(choice: Choice, named: NamedAlgorithm) -> Choice:
    """Return the choice for devices: the only segments are those that a measured label names."""
    is_cut = "segments" in choice.options and "segments" not in named.options
    one = {"segments": 1} if is_cut else {}
    return choice._replace(options={**choice.options, **one}, segments=1)


def _with_options(
    named: NamedAlgorithm,
    reason: str,
    size: int,
    num_bytes: int,
    topology: Topology | None,
    itemsize: int = 1,
) -> Choice:
    """Return the choice of an algorithm.

    It has the options and segments that depend on n and the hosts.
    """
    chosen = {**options(named.algorithm, size, num_bytes, topology), **named.options}
    if isinstance(num_named := named.options.get("segments"), int):
        num_parts = _num_parts(named.algorithm, size, tuple(named.options.items()))
        chosen["segments"] = max(1, min(num_named, -(-(num_bytes // itemsize) // num_parts)))
    segments = num_lanes(named.algorithm, size, num_bytes, tuple(chosen.items()))
    return Choice(named.algorithm, chosen, named.label, reason, segments)


def num_bytes_of(counts: Counts, itemsize: int) -> int:
    """Return the n of the formulas.

    It is the bytes of the vector, of all blocks, or of one all-to-all input.
    """
    if isinstance(counts, int):
        return counts * itemsize
    if isinstance(counts, CountOfEachBlock):
        return counts.num_elements * itemsize
    if isinstance(counts, OwnCounts):
        return sum(counts.sent) * itemsize
    numbers = [count if isinstance(count, int) else sum(count) for count in counts]
    num_parts = 1 if isinstance(counts[0], int) else len(counts)
    return sum(numbers) // num_parts * itemsize


@lru_cache(maxsize=256)
def _limits(collective: str, decisions: Decisions | None, hosts: Hosts) -> list[float]:
    """Return the sizes at which the choice may change, in order; between two it is the same."""
    limits = {rule.largest for rule in rules(collective, hosts)}
    if decisions is None:
        return sorted(limits)
    if decisions.fitted is not None:
        limits |= _PRICED
    return sorted(limits | decisions.limits(collective))


@lru_cache(maxsize=1024)
def _default(
    collective: str,
    size: int,
    num_bytes: float,
    is_free: bool,
    decisions: Decisions | None,
    topology: Topology | None,
    hosts: Hosts,
    generation: int,
) -> tuple[NamedAlgorithm, str]:
    """Return the algorithm that comes first and can run, and the reason.

    `is_free` says whether the order of combining does not matter.  `generation` is the version of
    the registry, because algorithms can be registered again under their names.
    """
    call = collective, size, num_bytes
    measured = () if decisions is None else _found(*call, decisions, topology)
    for label, reason in chain(measured, by_rules(*call, hosts)):
        named = parse_default(collective, label)
        is_allowed = is_free or named.algorithm.is_ordered
        if is_allowed and named.serves(size) and _has_valid_pieces(named, size):
            return named, reason
    raise AssertionError(f"no rule for {collective} covers {num_bytes} bytes on {size} ranks")


def _has_valid_pieces(named: NamedAlgorithm, size: int) -> bool:
    """Return whether an algorithm does not cut into too many pieces on so many ranks."""
    try:
        named.algorithm.case(size, **named.options)
    except ValueError:
        return False
    return True


def _hosts(topology: Topology | None, size: int, on_device: bool = False) -> Hosts:
    """Return the hosts as the rules know them."""
    if topology is None or topology.num_hosts == 1:
        return Hosts(1, size, on_device)
    return Hosts(topology.num_hosts, topology.max_per_host)


def _found(
    collective: str, size: int, num_bytes: float, decisions: Decisions, topology: Topology | None
) -> Iterator[tuple[str, str]]:
    """Yield what measurements say, best first, each with a text for the reason."""
    ranks = Ranks(size, 1 if topology is None else topology.num_hosts)
    yield from decisions.ranked(collective, ranks, num_bytes)
    if (machine := decisions.machine_for(topology)) is not None:
        largest = int(min(num_bytes, max(_PRICED)))
        sizes = size_range(num_bytes, num_bytes, _PRICED)
        for label, _ in predicted(collective, size, largest, machine, topology):
            yield label, f"least time predicted on the fitted machine: {sizes}"
    yield from decisions.ranked_nearby(collective, ranks, num_bytes)


def predicted(
    collective: str,
    size: int,
    num_bytes: int,
    machine: Machine | None,
    topology: Topology | None = None,
    labels: Iterable[str] = (),
) -> list[tuple[str, float]]:
    """Return the algorithms that can run, and the predicted seconds of each, the least first.

    `labels` are algorithms with options that are included.
    """
    serving = {
        label: named
        for label in dict.fromkeys((*algorithms.names(collective), *labels))
        if (named := parse_label(collective, label)).serves(size)
    }
    hosts = None if topology is None else topology.host_of
    choices = {
        label: _with_options(named, "", size, num_bytes, topology)
        for label, named in serving.items()
    }
    seconds = {
        label: cost.price_call(choice, size, num_bytes, machine, hosts)
        for label, choice in choices.items()
    }
    return sorted(seconds.items(), key=lambda entry: entry[1])


def options(
    algorithm: Algorithm, size: int, num_bytes: int, topology: Topology | None = None
) -> dict[str, Option]:
    """Return the options that are not given.

    They are the hosts, and a number of segments that fit in the cache.
    """
    added: dict[str, Option] = {}
    if "per_host" in algorithm.options:
        added["per_host"] = topology or Topology.consecutive(size, size)
    if "segments" in algorithm.options:
        added["segments"] = _num_segments(algorithm, size, num_bytes)
    return added


def _num_segments(algorithm: Algorithm, size: int, num_bytes: int) -> int:
    """Return the number of segments of a size that fits in the cache.

    Every number of segments of a registered algorithm must be proved when it is first used, so
    only a few numbers are used, and none for which the proof takes long.
    """
    num_parts = _num_parts(algorithm, size)
    segments = max(1, -(-num_bytes // (SEGMENT_BYTES * num_parts)))
    if algorithm.is_built_in:
        return min(segments, _MAX_SEGMENTS)
    power_of_two = 1 << (segments - 1).bit_length()
    most = min(_MAX_PROVED // (size * num_parts), _MAX_SEGMENTS)
    return max(1, min(power_of_two, most))


@lru_cache(maxsize=256)
def _num_parts(
    algorithm: Algorithm, size: int, options: tuple[tuple[str, Option], ...] = ()
) -> int:
    """Return the number of pieces of a vector, or of all blocks, before segments are cut.

    `options` are those that are given with the name of the algorithm.
    """
    given: dict[str, Any] = {**dict(options), "segments": 1}
    num_pieces = algorithm.case(size, **given).num_pieces
    return num_pieces if SPECS[algorithm.collective].has_pieces else num_pieces * size


# A named algorithm


def check(
    collective: str, text: str, size: int, operator: Operator | None = None
) -> NamedAlgorithm:
    """Return the named algorithm.

    Raises
    ------
    TypeError, ValueError
        If it does not exist or cannot serve.
    """
    named = parse_label(collective, text)
    if (restriction := restriction_of(named, size, operator)) is not None:
        raise ValueError(f"{collective} by {named.label} {restriction}")
    return named


def local(collective: str, text: str | None) -> str | None:
    """Return the named algorithm, or the default, for ranks that know only their own counts.

    Raises
    ------
    ValueError
        If the named algorithm needs the counts of all ranks.
    """
    if text is None:
        return LOCAL_DEFAULTS.get(collective)

    def serves(name: str) -> bool:
        return is_local(collective, name) or sends_counts_ahead(collective, name)

    if not serves(text):
        serving = [name for name in algorithms.names(collective) if serves(name)]
        raise ValueError(
            f"{collective} by {text} needs the counts of all ranks; with this rank's counts alone "
            f"it can be made by {', '.join(serving) or 'no algorithm'}"
        )
    return text


def is_local(collective: str, text: str) -> bool:
    """Return whether a rank needs only its own counts for this algorithm."""
    return parse_label(collective, text).algorithm.is_local


def with_shards(collective: str, text: str | None, shards: object) -> str | None:
    """Return the algorithm of a call with this number of logical shards, which becomes its option.

    The call has no shards if `shards` is None, and names no algorithm if `text` is None.

    Raises
    ------
    TypeError, ValueError
        If the number is wrong, or if the algorithm does not combine along the fixed tree.
    """
    if shards is None:
        if text is not None:
            parse_default(collective, text)
        return text
    given = None if text is None else parse_label(collective, text)
    named = 0 if given is None else given.options.get("shards", 0)
    number = validation.integer(shards, "shards")
    if number < 1 or named not in (0, number):
        raise ValueError(f"shards must be {named or 'at least 1'}, got {number}")
    serving = [name for name in algorithms.names(collective) if _takes_shards(collective, name)]
    name = serving[0] if given is None else given.algorithm.name
    if name not in serving:
        known = ", ".join(serving)
        raise ValueError(f"{collective} by {text} takes no shards; those that do: {known}")
    return f"{name}(shards={number})"


def _takes_shards(collective: str, name: str) -> bool:
    return "shards" in algorithms.info(collective, name).options


def sends_counts_ahead(collective: str, text: str) -> bool:
    """Return whether the counts of blocks can travel ahead of them, the way that they will take.

    That is so in an all-to-all that sends blocks on.  Algorithms that cut blocks into a number of
    pieces that depends on the size are not among them, and algorithms of users may do so.
    """
    algorithm = parse_label(collective, text).algorithm
    if collective != "all_to_all" or algorithm.is_local or "segments" in algorithm.options:
        return False
    return algorithm.is_built_in


def restriction_of(
    named: NamedAlgorithm, size: int, operator: Operator | None = None
) -> str | None:
    """Return why an algorithm cannot serve `size` ranks or this operator; None if it can."""
    algorithm = named.algorithm
    if not named.serves(size):
        return f"serves {algorithm.ranks_in_words} only, not {size}"
    if operator is not None and not (operator.is_commutative or algorithm.is_ordered):
        return f"needs a commutative operator; {operator.name} is not"
    return None


# Preferences for calls that name no algorithm

# Pairs (collective, label), the innermost first.
_preferred: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("preferred", default=())
preferences = _preferred.get  # returns all pairs, hashable


@contextmanager
def using(**algorithms: str) -> Iterator[None]:
    """Return a context manager in which calls that name no algorithm use these.

    If `with` blocks are nested, the inner one counts.  The choice belongs to the thread (or task)
    that makes it; what the library sends for itself is not affected.  If an algorithm cannot serve
    a call, that call raises ValueError, as if it had named it.

    Parameters
    ----------
    **algorithms : str
        For each collective, an algorithm as a call names it.  All ranks use the same.

    Raises
    ------
    ValueError
        For an unknown collective or algorithm.

    Examples
    --------
        with collectives.using(all_reduce="ring", broadcast="pipeline(segments=8)"):
            ...
    """
    labels = [
        (collective, parse_label(collective, text).label) for collective, text in algorithms.items()
    ]
    token = _preferred.set((*labels, *_preferred.get()))
    try:
        yield
    finally:
        _preferred.reset(token)


def preferred(collective: str) -> str | None:
    """Return the preferred algorithm of calls that name none; None to choose."""
    return next((label for name, label in _preferred.get() if name == collective), None)
