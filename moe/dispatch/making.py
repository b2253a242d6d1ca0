"""The dispatchers by name."""

from __future__ import annotations

from moe.dispatch.cheaper import Cheaper
from moe.dispatch.dispatcher import Dispatcher
from moe.dispatch.flat import Flat
from moe.dispatch.gathered_weights import GatheredWeights
from moe.dispatch.hierarchical import Hierarchical
from moe.dispatch.options import Options, check_choice
from moe.exchange import Experts, Team

WITHOUT_HOSTS: dict[str, type[Flat | GatheredWeights | Cheaper]] = {
    "flat": Flat,
    "weights": GatheredWeights,
    "cheaper": Cheaper,
}
DISPATCHERS = ("flat", "hierarchical", "weights", "cheaper")


def make_dispatcher(
    name: str, options: Options, team: Team, experts: Experts, ranks_per_host: int | None = None
) -> Dispatcher:
    """Return the dispatcher of this `name`, one of `DISPATCHERS`.

    `ranks_per_host`: how many consecutive ranks of the mesh are on a host; None: as its
    communicator knows.  Raises ValueError for another name, for options that the dispatcher does
    not have, and for `ranks_per_host` less than 1.
    """
    check_choice("dispatch", name, DISPATCHERS)
    if name == "hierarchical":
        return Hierarchical(options, team, experts, team.mesh.hosts(ranks_per_host))
    return WITHOUT_HOSTS[name](options, team, experts)
