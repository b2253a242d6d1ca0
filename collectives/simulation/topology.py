"""Networks that are named by a text, such as "hosts:512x8,nics=4" or "torus:4x8"."""

from __future__ import annotations

from typing import NamedTuple

from collectives.simulation.machine import OTHER_HOST, Machine
from collectives.simulation.network import Level, Network, Torus, Tree

TOPOLOGIES = """\
hosts:NxG             N hosts with G ranks each; options:
  nics=K              of each host, which its ranks divide; default: 1
  nic=BYTES           a second of each; default: of one message between hosts
  rack=R              R hosts share an uplink; oversubscription=F: it has 1/F of their NICs
  island=I            I consecutive ranks are connected by the machine's links "island"
fat-tree:radix=K      switches with K ports; options:
  levels=L            of switches; default: 3
  oversubscription=F  of the links out of the lowest switches; default: 1
  ranks=G             of a host; default: 1; nics, nic and island as above
torus:AxBxC           A x B x C ranks; each sends along one dimension after the other"""


class _Text(NamedTuple):
    """A text in its parts: the kind, the extents, the options."""

    kind: str
    extents: tuple[int, ...]
    options: dict[str, float]

    def whole(self, name: str, default: int) -> int:
        """Return an option that is a whole number.  Raises ValueError if it is not."""
        value = self.options.get(name, default)
        if value != int(value) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value:g}")
        return int(value)


def network_of(
    text: str, machine: Machine, num_ranks: int | None = None, *, is_folded: bool = False
) -> Network:
    """Return the network that a text names.

    Parameters
    ----------
    text : str
        See `TOPOLOGIES`.
    machine : Machine
        Its links give the rates that the text does not.
    num_ranks : int, optional
        The number of ranks, from rank 0 on, that take part.  By default all that fit do.
    is_folded : bool
        Whether the ranks of a largest group stand for all ranks.

    Raises
    ------
    ValueError
        For a text that names no network, or for too many ranks.
    """
    parsed = _parsed(text)
    if parsed.kind == "torus":
        return _torus(parsed, machine, num_ranks, is_folded)
    most, levels = {"hosts": _hosts, "fat-tree": _fat_tree}[parsed.kind](parsed, machine)
    if num_ranks is not None and num_ranks > most:
        raise ValueError(f"{text} has room for {most} ranks, not for {num_ranks}")
    island = parsed.whole("island", 1)
    return Tree(machine, num_ranks or most, levels, island=island, is_folded=is_folded)


def _torus(parsed: _Text, machine: Machine, num_ranks: int | None, is_folded: bool) -> Network:
    torus = Torus(machine, parsed.extents, is_folded=is_folded)
    if num_ranks not in (None, torus.num_ranks):
        raise ValueError(f"a torus of {torus.num_ranks} ranks has no {num_ranks} ranks")
    return torus


def _hosts(parsed: _Text, machine: Machine) -> tuple[int, tuple[Level, ...]]:
    """Return the number of ranks, and the levels: the NICs, and the uplinks of racks."""
    num_hosts, per_host = parsed.extents
    nic, levels = _nic(parsed, machine, per_host), []
    if "rack" in parsed.options:
        rack, over = parsed.whole("rack", 1), parsed.options.get("oversubscription", 1.0)
        capacity = rack * nic.lanes * nic.capacity / over
        levels.append(Level("uplink of a rack", rack * per_host, 1, capacity))
    return num_hosts * per_host, (nic, *levels)


def _fat_tree(parsed: _Text, machine: Machine) -> tuple[int, tuple[Level, ...]]:
    """Return the number of ranks, and the levels: the NICs, and the links out of switches.

    The switches of the last level have no links out.  The links out of a switch, or out of all
    switches that connect the same hosts, are one link of their joint capacity.
    """
    radix, num_levels = parsed.whole("radix", 0), parsed.whole("levels", 3)
    over, per_host = parsed.options.get("oversubscription", 1.0), parsed.whole("ranks", 1)
    num_up = radix / (1 + over)
    if num_up != int(num_up) or radix % 2:
        raise ValueError(f"{radix} ports cannot be divided by {over:g} to 1")
    nic, num_hosts, levels = _nic(parsed, machine, per_host), radix - int(num_up), []
    links = num_up * nic.lanes * nic.capacity
    for level in range(1, num_levels):
        levels.append(Level(f"links out of level {level}", num_hosts * per_host, 1, links))
        width = radix // 2 if level < num_levels - 1 else radix
        num_hosts, links = num_hosts * width, links * width
    return num_hosts * per_host, (nic, *levels)


def _nic(parsed: _Text, machine: Machine, per_host: int) -> Level:
    capacity = parsed.options.get("nic", machine.bytes_per_second(OTHER_HOST))
    return Level("NIC", per_host, parsed.whole("nics", 1), capacity)


_OPTIONS = {
    "hosts": ("nics", "nic", "rack", "oversubscription", "island"),
    "fat-tree": ("radix", "levels", "oversubscription", "ranks", "nics", "nic", "island"),
    "torus": (),
}
_SUFFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def _parsed(text: str) -> _Text:
    """Return the parts of a text.  Raises ValueError for a text that names no network."""
    kind, _, rest = text.partition(":")
    if kind not in _OPTIONS:
        raise ValueError(f"a topology is {', '.join(_OPTIONS)}, then a colon; got {text!r}")
    parts = rest.split(",")
    extents = () if kind == "fat-tree" else tuple(_whole(text, x) for x in parts.pop(0).split("x"))
    if kind == "hosts" and len(extents) != 2:
        raise ValueError(f"{text!r} is not like hosts:512x8")
    options = dict(_option(text, kind, part) for part in parts)
    if kind == "fat-tree" and "radix" not in options:
        raise ValueError(f"{text!r} is not like fat-tree:radix=16,levels=3")
    return _Text(kind, extents, options)


def _whole(text: str, word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise ValueError(f"{text!r}: {word!r} is not a number of at least 1")
    return int(word)


def _option(text: str, kind: str, part: str) -> tuple[str, float]:
    name, _, word = part.partition("=")
    if name not in _OPTIONS[kind]:
        known = ", ".join(_OPTIONS[kind]) or "none"
        raise ValueError(f"{text!r}: {kind} has no option {name!r}; it has {known}")
    factor = _SUFFIXES.get(word[-1:].upper(), 1.0)
    try:
        value = float(word[:-1] if factor > 1 else word) * factor
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r}: {name} is not a number of more than 0")
    return name, value
