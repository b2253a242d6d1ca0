"""The ways to bring tokens and experts together.

`Flat` sends each token to the ranks of its experts, `Hierarchical` once to each host, and
`GatheredWeights` sends the experts' weights to the tokens; `Cheaper` takes the first or the last.
A `Way` has two halves, forward and backward, and a `plan` that says what they will send.
"""

from collections.abc import Callable

from moe.experts import Experts
from moe.ways.cheaper import Cheaper
from moe.ways.flat import Flat
from moe.ways.hierarchical import Hierarchical
from moe.ways.options import PADDINGS, Options, check_choice
from moe.ways.team import Team
from moe.ways.way import Forecast, Plan, Way
from moe.ways.weights import GatheredWeights

WAYS = ("flat", "hierarchical", "weights", "cheaper")


def make_way(
    name: str, options: Options, team: Team, experts: Experts, ranks_per_host: int | None = None
) -> Way:
    """Return the way of this `name`, one of `WAYS`.

    `ranks_per_host`: how many consecutive ranks of the mesh are on a host; None: as its
    communicator knows.  Raises ValueError for another name, for options that the way does not have,
    and for `ranks_per_host` less than 1.
    """
    check_choice("dispatch", name, WAYS)
    if name == "hierarchical":
        return Hierarchical(options, team, experts, team.mesh.hosts(ranks_per_host))
    simple: dict[str, Callable[[Options, Team, Experts], Way]] = {
        "flat": Flat, "weights": GatheredWeights, "cheaper": Cheaper,
    }  # fmt: skip
    return simple[name](options, team, experts)


__all__ = [
    "PADDINGS", "WAYS", "Cheaper", "Flat", "Forecast", "GatheredWeights", "Hierarchical",
    "Options", "Plan", "Team", "Way", "make_way",
]  # fmt: skip
