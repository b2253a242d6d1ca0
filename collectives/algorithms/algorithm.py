"""An algorithm: its function, its costs and restrictions, its schedules and their proof."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from collectives.algorithms.formulas import (
    Cost,
    Formula,
    Option,
    all_rounds,
    arguments,
    checked_num_pieces,
    topology_of,
)
from collectives.schedule import (
    SPECS,
    Case,
    Operation,
    Round,
    Schedule,
    ScheduleError,
    Topology,
    floor_log2,
    verify_schedules,
)

Ranks = Literal["any", "even", "power of two", "multiple of x * y", "at most shards"]

# The options whose product divides the number of ranks.
DIVISORS = {"multiple of x * y": ("x", "y")}

MAX_OPTION = 2**16  # the greatest value of an option
MAX_PROVED = 2**20  # operations and their blocks, of all ranks: some ten seconds of proof

_PROVING = threading.RLock()  # if ranks are threads, one proves and the others wait


@dataclass(frozen=True, eq=False)
class Algorithm:
    """One algorithm of one collective, and what it promises.

    The costs are those of the worst root, with blocks of equal size, and 0 for one rank.  In the
    formulas, n is the size in bytes of the whole vector; for scatter and gather that of the root's
    buffer, for all-gather that of the result, for all-to-all that of one rank's input.

    Attributes
    ----------
    collective, name : str
    function : function
        Yields the rounds of a rank.
    rounds : Formula
        The number of rounds.
    startups : Formula
        The sum over rounds of the most messages that one rank sends or receives; it is equal to the
        rounds if that is one message.
    messages, total_bytes : Formula
        The messages and bytes of all ranks together.
    max_bytes_per_rank : Formula
        The most bytes that one rank sends or receives.
    critical_bytes : Formula
        The sum over rounds of the most bytes that one rank sends or receives in the round.
    reduction_bytes : Formula
        The most bytes that one rank combines.
    scratch_bytes : Formula, optional
        A bound of the bytes that a rank needs in addition to input and output, out of place; None:
        not stated.
    pieces : Formula
        The number of pieces of a vector.
    ranks : str
        The numbers of ranks that the algorithm serves.
    is_ordered : bool
        Whether it combines in rank order, so that the operator need not be commutative.
    is_bitwise : bool
        Whether all ranks with the same result get the same bits, even if rounding depends on the
        order.
    is_invariant : bool
        Whether it combines along the fixed tree, so that a result has the same bits by any other
        algorithm that does, and with `shards` on any number of ranks.
    is_local : bool
        In a gather, scatter or all-to-all, whether a rank handles only blocks of its own input and
        output, so that it needs no other counts.
    source : str
        The publication.
    use : str
        When to use it, in a sentence.
    options : mapping of str to int or Topology
        The options of the function, with their defaults.
    is_built_in : bool
        Whether the test suite proves it; another algorithm is proved before the first use of each
        number of ranks, root and options.
    """

    collective: str
    name: str
    function: Callable[..., Iterator[Round]]
    rounds: Cost
    startups: Cost
    messages: Cost
    max_bytes_per_rank: Cost
    total_bytes: Cost
    critical_bytes: Cost
    reduction_bytes: Cost
    scratch_bytes: Formula | None
    pieces: Formula
    ranks: Ranks = "any"
    is_ordered: bool = False
    is_bitwise: bool = True
    is_invariant: bool = False
    is_local: bool = False
    source: str = ""
    use: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    is_built_in: bool = True
    _proved: set[tuple[Any, ...]] = field(default_factory=set, init=False, repr=False)

    @property
    def label(self) -> str:
        """Its collective and its name, for messages."""
        return f"{self.collective}.{self.name}"

    @property
    def restrictions(self) -> str:
        """The restrictions as text."""
        words = [self.ranks_in_words]
        if SPECS[self.collective].is_reduction:
            words.append("any operator" if self.is_ordered else "commutative operators")
        if self.collective == "all_reduce":
            words.append("same bits on all ranks" if self.is_bitwise else "last bits may differ")
        if self.is_invariant:
            words.append("along the fixed tree")
        return ", ".join(words)

    @property
    def ranks_in_words(self) -> str:
        """The numbers of ranks it serves."""
        return {
            "any": "any number of ranks",
            "even": "an even number of ranks",
            "power of two": "a power of two of ranks",
            "multiple of x * y": "a multiple of x * y ranks",
            "at most shards": "a number of ranks up to that of the shards",
        }[self.ranks]

    def serves(self, size: int, **options: Option) -> bool:
        """Return whether the algorithm can run on `size` ranks."""
        chosen: dict[str, Any] = {**self.options, **options}
        if self.ranks == "at most shards":
            most: int = chosen["shards"] or size
            return size <= most
        if self.ranks in DIVISORS:
            parts: list[int] = [chosen[option] for option in DIVISORS[self.ranks]]
            return size % math.prod(parts) == 0
        return {"any": True, "even": size % 2 == 0, "power of two": size == 1 << floor_log2(size)}[
            self.ranks
        ]

    def hosts(self, size: int, **options: Option) -> Topology:
        """Return the hosts of `size` ranks; only one if the algorithm does not know hosts.

        Raises
        ------
        ValueError
            If `per_host` is a topology of another number of ranks.
        """
        return topology_of(size, {"per_host": size, **self.options, **options}["per_host"])

    def case(self, size: int, root: int | None = None, **options: Option) -> Case:
        """Return the instance of the collective for `size` ranks, this `root` and these options."""
        num_pieces = checked_num_pieces(self.label, self.pieces, size, options)
        chosen: dict[str, Any] = {**self.options, **options}
        return Case(size, root or 0, num_pieces, chosen.get("shards", 0))

    def schedule(
        self, rank: int, size: int, root: int | None = None, **options: Option
    ) -> Schedule:
        """Return the rounds of one rank of `size` ranks.

        Raises
        ------
        ValueError
            If the algorithm does not serve this number of ranks, this `root` or these `options`.
        ScheduleError
            If a registered algorithm is wrong, on every rank.
        """
        self._check(rank, size, root, options)
        if not self.is_built_in:
            self._require_proof(size, root, options)
        return self._rounds(rank, size, root, options)

    def verify(self, size: int, root: int | None = None, **options: Option) -> None:
        """Prove the algorithm for `size` ranks and `root`.

        Raises
        ------
        ScheduleError
            If the algorithm is wrong.  The message ends with the grid.
        """
        self._check(0, size, root, options)
        case = self.case(size, root, **options)
        schedules = [self._rounds(rank, size, root, options) for rank in range(size)]
        verify_schedules(
            self.collective,
            case,
            schedules,
            is_ordered=self.is_ordered,
            is_bitwise=self.is_bitwise,
            is_invariant=self.is_invariant,
        )

    def prove(self, size: int, root: int | None = None, **options: Option) -> None:
        """Prove the algorithm for `size` ranks and `root` as `verify` does, but only once.

        Every rank proves the schedules of all ranks, so all ranks get the same result.

        Raises
        ------
        ValueError
            If the proof would take too long.
        ScheduleError
            If the algorithm is wrong.
        """
        self._check(0, size, root, options)
        key = (size, root or 0, *sorted({**self.options, **options}.items()))
        if key in self._proved:
            return
        with _PROVING:
            if key not in self._proved:
                self._refuse_long_proof(size, root, options)
                self.verify(size, root, **options)
                self._proved.add(key)

    def _require_proof(self, size: int, root: int | None, options: Mapping[str, Option]) -> None:
        """Prove the algorithm.

        If it is wrong, the error names the ranks, root and options.
        """
        try:
            self.prove(size, root, **options)
        except ScheduleError as error:
            given = "".join(f", {name}={value}" for name, value in options.items())
            at_root = "" if root is None else f", root {root}"
            raise ScheduleError(f"{self.label}, {size} ranks{at_root}{given}: {error}") from error

    def _refuse_long_proof(
        self, size: int, root: int | None, options: Mapping[str, Option]
    ) -> None:
        """Raise ValueError for schedules of too many operations."""
        num_steps = size * self.case(size, root, **options).num_pieces
        for rank in range(size):
            if num_steps <= MAX_PROVED:
                num_steps += sum(map(proof_effort, self._rounds(rank, size, root, options)))
        if num_steps > MAX_PROVED:
            raise ValueError(
                f"{self.label} on {size} ranks with {dict(options)} has more than {MAX_PROVED} "
                "operations on blocks, too many to prove it before it is used"
            )

    def _rounds(
        self, rank: int, size: int, root: int | None, options: Mapping[str, Option]
    ) -> Schedule:
        """Return the rounds of the function, without a proof."""
        where = {"root": root or 0} if SPECS[self.collective].is_rooted else {}
        settings = arguments(size, {**self.options, **options})
        return all_rounds(self.label, self.function(rank, size, **where, **settings))

    def _check(self, rank: int, size: int, root: int | None, options: Mapping[str, Option]) -> None:
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"{self.label}: there is no rank {rank} among {size} ranks")
        if root is not None and not SPECS[self.collective].is_rooted:
            raise ValueError(f"{self.label}: {self.collective} has no root; got root={root}")
        if root is not None and not 0 <= root < size:
            raise ValueError(f"{self.label}: there is no root {root} among {size} ranks")
        self.check_options(options)
        self.hosts(size, **options)
        if not self.serves(size, **options):
            raise ValueError(f"{self.label} serves {self.ranks_in_words}, not {size}")

    def check_options(self, options: Mapping[str, Option]) -> None:
        """Raise ValueError for `options` that the algorithm does not have, or for wrong values."""
        if unknown := sorted(set(options) - set(self.options)):
            known = dict(self.options)
            raise ValueError(f"{self.label} knows no option {unknown[0]!r}; it has {known}")
        for name, value in options.items():
            if name == "per_host" and isinstance(value, Topology):
                continue
            least = {"radix": 2, "shards": 0}.get(name, 1)
            if type(value) is not int:
                raise ValueError(f"{self.label}: {name} must be an int, not {value!r}")
            if value < least:
                raise ValueError(f"{self.label}: {name} is at least {least}, got {value}")
            if value > MAX_OPTION:
                raise ValueError(f"{self.label}: {name} is at most {MAX_OPTION}, got {value}")


def proof_effort(operations: object) -> int:
    """Return the effort to prove a round: the number of its operations and of their blocks."""
    if not isinstance(operations, tuple):
        return 1  # the proof refuses it
    blocks = [op.blocks for op in operations if isinstance(op, Operation)]
    return 1 + sum(1 + len(names) for names in blocks if isinstance(names, tuple))
