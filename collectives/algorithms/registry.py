"""The registry of algorithms, with their formulas, restrictions and sources."""

from __future__ import annotations

import ast
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from types import CodeType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

from collectives.schedule import (
    SPECS,
    Case,
    Counts,
    Operation,
    Round,
    Schedule,
    ScheduleError,
    ceil_log2,
    count,
    even_sizes,
    floor_log2,
    trees,
    two_trees,
    verify_schedules,
)

Ranks = Literal["any", "even", "power of two", "multiple of per_host"]
Function = TypeVar("Function", bound=Callable[..., Iterator[Round]])

# What is refused because it is too large, or would never end.
MAX_OPTION = 2**16  # the greatest value of an option
MAX_PIECES = 2**20  # of a vector, or of a block
MAX_ROUNDS = 2**18  # of a schedule
MAX_PROVED = 2**20  # operations and their blocks, of all ranks: some ten seconds of proof

# How formulas call the options.
SYMBOLS = {"segments": "N", "radix": "r", "outstanding": "m", "chains": "c", "per_host": "g"}


class Formula:
    """A closed formula: `text` is an expression, which is evaluated in exact arithmetic.

    Variables: p ranks, n bytes, f = (p - 1) / p, q = ceil(log2 p), k = floor(log2 p), P = 2**k, and
    the options: N segments, radix r, m outstanding messages, c chains, g ranks per host.
    Functions: sum, range, min, max, ceil, and, as `trees` and `two_trees` define them, log(p, r) =
    ceil_log, power(p, r) = power_within, children(p, r) = num_children, hops(p, r) = num_hops,
    depth(m), fill(p), turn(p) = exscan_turn.
    `defaults`: the options' values where none are given.  `is_cost`: for one rank, which has
    nobody to send to, it is 0 without being evaluated.
    """

    def __init__(
        self, text: str, defaults: Mapping[str, int] | None = None, *, is_cost: bool = False
    ) -> None:
        self.text, self.defaults, self._is_cost = text, dict(defaults or {}), is_cost
        try:
            exact = ast.fix_missing_locations(_Exact().visit(ast.parse(text, mode="eval")))
            self._code: CodeType = compile(exact, f"<formula {text}>", "eval")
            self(p=2)
        except (SyntaxError, NameError, TypeError, LookupError, ArithmeticError) as error:
            raise ValueError(f"formula {text!r}: {error}") from None

    def __call__(self, p: int, n: int = 0, **options: int) -> int | Fraction:
        """The value for `p` ranks and `n` bytes; an int where it is whole."""
        if self._is_cost and p == 1:
            return 0
        logs = {"q": ceil_log2(p), "k": floor_log2(p), "P": 1 << floor_log2(p)}
        chosen = {SYMBOLS[name]: value for name, value in {**self.defaults, **options}.items()}
        values = {"p": p, "n": Fraction(n), "f": Fraction(p - 1, p), **logs, **chosen}
        value = eval(self._code, {**_FUNCTIONS, **values})
        if not isinstance(value, (int, Fraction)):
            raise TypeError(f"it gives {value!r}, not a whole number or a fraction")
        value = Fraction(value)
        return value.numerator if value.denominator == 1 else value

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Formula({self.text!r})"


class _Exact(ast.NodeTransformer):
    """Turns quotients into fractions, and refuses attributes in formulas."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return node
        return ast.Call(ast.Name("over", ast.Load()), [node.left, node.right], [])

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        raise SyntaxError(f"a formula cannot use the attribute .{node.attr}")


_FUNCTIONS: dict[str, Any] = {
    "over": Fraction,
    "__builtins__": {},
    "sum": sum,
    "range": range,
    "min": min,
    "max": max,
    "ceil": math.ceil,
    "log": trees.ceil_log,
    "power": trees.power_within,
    "children": trees.num_children,
    "hops": trees.num_hops,
    "depth": trees.depth,
    "turn": trees.exscan_turn,
    "fill": two_trees.fill,
}


class Counted(NamedTuple):
    """A cost without a formula: it is counted in the schedules of all ranks.

    Called like a formula.  The worst over all roots, as a formula is.
    """

    name: str
    collective: str
    function: Callable[..., Iterator[Round]]
    defaults: Mapping[str, int]
    pieces: Formula

    def __call__(self, p: int, n: int = 0, **options: int) -> int | Fraction:
        """The value for `p` ranks and `n` bytes."""
        is_rooted, settings = SPECS[self.collective].is_rooted, {**self.defaults, **options}
        case = Case(p, 0, _num_pieces(self.collective, self.pieces, p, settings))
        found: list[int | Fraction] = [
            getattr(self.at({"root": root} if is_rooted else {}, case, n, settings), self.name)
            for root in range(p if is_rooted else 1)
        ]
        return max(found)

    def at(self, where: dict[str, int], case: Case, n: int, settings: Mapping[str, int]) -> Counts:
        """Everything that can be counted, for one root."""
        schedules = [
            _listed(self.collective, self.function(rank, case.size, **where, **settings))
            for rank in range(case.size)
        ]
        return count(schedules, even_sizes(self.collective, case, n))

    def __str__(self) -> str:
        return "counted"


Cost = Formula | Counted


def _num_pieces(label: str, pieces: Formula, size: int, options: Mapping[str, int]) -> int:
    """The number of pieces for `size` ranks.  Raises ValueError if it is not valid."""
    number = pieces(p=size, **options)
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"{label} cuts into {number} pieces")
    if number > MAX_PIECES:
        raise ValueError(f"{label} cuts into more than {MAX_PIECES} pieces on {size} rank(s)")
    return number


def _num_steps(operations: object) -> int:
    """The effort to prove a round: the number of its operations and of their blocks."""
    if not isinstance(operations, tuple):
        return 1  # the proof refuses it
    blocks = [op.blocks for op in operations if isinstance(op, Operation)]
    return 1 + sum(1 + len(each) for each in blocks if isinstance(each, tuple))


def _listed(label: str, rounds: Iterator[Round]) -> Schedule:
    """All rounds.  Raises ValueError if there are too many; the function may never end."""
    schedule = list(islice(rounds, MAX_ROUNDS + 1))
    if len(schedule) > MAX_ROUNDS:
        raise ValueError(f"{label} has more than {MAX_ROUNDS} rounds")
    return schedule


_PROVING = threading.RLock()  # ranks may be threads, of which one proves and the others wait


@dataclass(frozen=True, eq=False)
class Algorithm:
    """One algorithm of one collective, and what it promises.

    `ranks`: the numbers of ranks it serves.  `is_ordered`: it combines in rank order, so that the
    operator need not be commutative.  `is_bitwise`: ranks that get the same result get the same
    bits, also where rounding depends on the order.  `pieces`: into how many it cuts a vector.
    `options`: what the function takes beyond rank, size and root, with the defaults.
    `source`: who published it.  `use`: when to use it, in a sentence.
    `is_built_in`: the test suite proves it.  Any other one is proved for each number of ranks, root
    and options before they are used for the first time.

    Formulas, each the worst over all roots, with blocks of equal size, and 0 for one rank:

    - `rounds`: the number of rounds.
    - `startups`: the sum over rounds of the most messages that one rank sends or receives, equal to
      the rounds where that is one message.
    - `messages`, `total_bytes`: what all ranks together send.
    - `max_bytes_per_rank`: the most bytes that one rank sends or receives.
    - `critical_bytes`: the sum over rounds of the most bytes that one rank sends or receives in the
      round.
    - `reduction_bytes`: the most bytes that one rank combines.
    - `scratch_bytes`: a bound of the bytes that a rank needs besides input and output, out of
      place; None: not stated.

    n is the size in bytes of the whole vector; for scatter and gather that of the root's buffer,
    for all-gather that of the result, for all-to-all that of one rank's input.
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
    source: str = ""
    use: str = ""
    options: Mapping[str, int] = field(default_factory=dict)
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
        return ", ".join(words)

    @property
    def ranks_in_words(self) -> str:
        """The numbers of ranks it serves."""
        return {
            "any": "any number of ranks",
            "even": "an even number of ranks",
            "power of two": "a power of two of ranks",
            "multiple of per_host": "a multiple of per_host ranks",
        }[self.ranks]

    def serves(self, size: int, **options: int) -> bool:
        """Whether the algorithm can run on `size` ranks."""
        if self.ranks == "multiple of per_host":
            return size % {**self.options, **options}["per_host"] == 0
        return {
            "any": True,
            "even": size % 2 == 0,
            "power of two": size == 1 << floor_log2(size),
        }[self.ranks]

    def case(self, size: int, root: int | None = None, **options: int) -> Case:
        """The instance of the collective that `size` ranks with this `root` and options solve."""
        return Case(size, root or 0, _num_pieces(self.label, self.pieces, size, options))

    def schedule(self, rank: int, size: int, root: int | None = None, **options: int) -> Schedule:
        """The rounds of one rank of `size` ranks.

        Raises ValueError for what the algorithm cannot serve, and on every rank ScheduleError if a
        registered algorithm is wrong for this number of ranks, this root or these options.
        """
        self._check(rank, size, root, options)
        if not self.is_built_in:
            self._demand_proof(size, root, options)
        return self._rounds(rank, size, root, options)

    def verify(self, size: int, root: int | None = None, **options: int) -> None:
        """Prove it for `size` ranks and `root`, or raise `ScheduleError` with the grid."""
        self._check(0, size, root, options)
        case = self.case(size, root, **options)
        schedules = [self._rounds(rank, size, root, options) for rank in range(size)]
        promises = {"is_ordered": self.is_ordered, "is_bitwise": self.is_bitwise}
        verify_schedules(self.collective, case, schedules, **promises)

    def prove(self, size: int, root: int | None = None, **options: int) -> None:
        """Prove it for `size` ranks and `root` as `verify` does, but only once.

        Raises ValueError if the proof would take too long.

        Every rank proves the schedules of all ranks, so all ranks come to the same verdict.
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

    def _demand_proof(self, size: int, root: int | None, options: Mapping[str, int]) -> None:
        """Prove it; if it is wrong, raise an error that names the ranks, root and options."""
        try:
            self.prove(size, root, **options)
        except ScheduleError as error:
            given = "".join(f", {name}={value}" for name, value in options.items())
            at_root = "" if root is None else f", root {root}"
            raise ScheduleError(f"{self.label}, {size} ranks{at_root}{given}: {error}") from error

    def _refuse_long_proof(self, size: int, root: int | None, options: Mapping[str, int]) -> None:
        """Raise ValueError for schedules of too many operations."""
        num_steps = size * self.case(size, root, **options).num_pieces
        for rank in range(size):
            if num_steps <= MAX_PROVED:
                num_steps += sum(map(_num_steps, self._rounds(rank, size, root, options)))
        if num_steps > MAX_PROVED:
            raise ValueError(
                f"{self.label} on {size} ranks with {dict(options)} has more than {MAX_PROVED} "
                "operations on blocks, too many to prove it before it is used"
            )

    def _rounds(
        self, rank: int, size: int, root: int | None, options: Mapping[str, int]
    ) -> Schedule:
        """The rounds of the function, without a proof."""
        where = {"root": root or 0} if SPECS[self.collective].is_rooted else {}
        settings = {**self.options, **options}
        return _listed(self.label, self.function(rank, size, **where, **settings))

    def _check(self, rank: int, size: int, root: int | None, options: Mapping[str, int]) -> None:
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"{self.label}: there is no rank {rank} among {size} ranks")
        if root is not None and not SPECS[self.collective].is_rooted:
            raise ValueError(f"{self.label}: {self.collective} has no root; got root={root}")
        if root is not None and not 0 <= root < size:
            raise ValueError(f"{self.label}: there is no root {root} among {size} ranks")
        self.check_options(options)
        if not self.serves(size, **options):
            raise ValueError(f"{self.label} serves {self.ranks_in_words}, not {size}")

    def check_options(self, options: Mapping[str, int]) -> None:
        """Raise ValueError for `options` that the algorithm does not have, or for wrong values."""
        if unknown := sorted(set(options) - set(self.options)):
            known = dict(self.options)
            raise ValueError(f"{self.label} knows no option {unknown[0]!r}; it has {known}")
        for name, value in options.items():
            least = 2 if name == "radix" else 1
            if type(value) is not int:
                raise ValueError(f"{self.label}: {name} must be an int, not {value!r}")
            if value < least:
                raise ValueError(f"{self.label}: {name} is at least {least}, got {value}")
            if value > MAX_OPTION:
                raise ValueError(f"{self.label}: {name} is at most {MAX_OPTION}, got {value}")


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


def algorithm(
    *,
    rounds: str,
    max_bytes_per_rank: str,
    reduction_bytes: str = "0",
    pieces: str = "1",
    **more: Any,
) -> Callable[[Function], Function]:
    """Enter a function into the registry, under its file's collective and its own name.

    Takes every formula as text, and what else an `Algorithm` promises.  Where nothing else is said
    a rank sends and receives one message a round, and all rounds load the same port most.
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
        enter(Algorithm(collective, function.__name__, function, **formulas, **more))
        return function

    return decorate


def _collective_of(function: Callable[..., Any]) -> str:
    """The collective whose file a built-in algorithm is in."""
    return function.__module__.rpartition(".")[2]


_generation = 0
_ENTERING = threading.Lock()


class Cache(Protocol):
    """A cache whose keys contain names of algorithms."""

    def forget(self) -> object:
        """Forget all of them."""


_CACHES: WeakSet[Cache] = WeakSet()


def watch(cache: Cache) -> None:
    """Clear a cache at every registration, as long as it exists."""
    _CACHES.add(cache)


def generation() -> int:
    """A number that grows with every registration.

    A name may be registered again, so a cache keyed by names has this in its keys as well.
    """
    return _generation


def enter(entry: Algorithm) -> None:
    """Add an algorithm to the registry; it replaces one of the same name."""
    global _generation
    with _ENTERING:
        REGISTRY[entry.collective][entry.name] = entry
        _generation += 1  # last: who reads the new number finds the new algorithm
    for cache in list(_CACHES):
        cache.forget()


def costs_of(function: Callable[..., Iterator[Round]], **other: Any) -> dict[str, Any]:
    """The formulas, the restriction and the options of an algorithm, with changes.

    A dual has the same rounds, messages, ports and bytes; the work is to be said anew.
    """
    entry = REGISTRY[_collective_of(function)][function.__name__]
    shared = (*(name for name in COSTS if name != "reduction_bytes"), "pieces")
    texts = {key: str(getattr(entry, key)) for key in shared}
    return {**texts, "ranks": entry.ranks, "options": entry.options, **other}
