"""The costs of algorithms: closed formulas in exact arithmetic, and costs that are counted."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import islice
from types import CodeType
from typing import Any, NamedTuple

from collectives.schedule import (
    SPECS,
    Case,
    Counts,
    Round,
    Schedule,
    Topology,
    ceil_log2,
    count,
    even_sizes,
    fixed_tree,
    floor_log2,
    negabinary,
    trees,
    two_trees,
)

# Larger values are refused, because a schedule would be too large or would never end.
MAX_PIECES = 2**20  # of a vector, or of a block
MAX_ROUNDS = 2**18  # of a schedule

# The names of the options in formulas.
SYMBOLS = {
    "segments": "N",
    "radix": "r",
    "outstanding": "m",
    "chains": "c",
    "per_host": "g",
    "x": "x",
    "y": "y",
    "aggregation": "A",
    "shards": "L",
}

Option = int | Topology
"""The value of an option.

`per_host` is the number of consecutive ranks on each host, of which the last has what is left, or
any other topology.
"""


@lru_cache(maxsize=256)  # every schedule of every rank asks for it
def topology_of(size: int, per_host: Option) -> Topology:
    """Return the topology that the option `per_host` stands for.

    Raises ValueError if `size` ranks do not fit it.
    """
    if isinstance(per_host, int):
        return Topology.consecutive(size, per_host)
    per_host.check_size(size)
    return per_host


def arguments(size: int, options: Mapping[str, Option]) -> dict[str, Any]:
    """Return the options as the function of an algorithm takes them: `hosts` for `per_host`."""
    if "per_host" not in options:
        return dict(options)
    others = {name: value for name, value in options.items() if name != "per_host"}
    return {"hosts": topology_of(size, options["per_host"]), **others}


class Formula:
    """A closed formula, which is evaluated in exact arithmetic.

    Variables: p ranks, n bytes, f = (p - 1) / p, q = ceil(log2 p), k = floor(log2 p), P = 2**k, and
    the options: N segments, radix r, m outstanding messages, c chains, x and y ranks in the
    dimensions of a torus, aggregation A, L logical shards (0: one on each rank), and, if the
    algorithm knows hosts, H hosts, of which the largest has g ranks.

    Functions: sum, range, min, max, ceil; of `trees` log(p, r) = ceil_log, power(p, r) =
    power_within, children(p, r) = num_children, hops(p, r) = num_hops, depth(m) and turn(p) =
    exscan_turn; of `two_trees` fill(p); of `negabinary` bine_hops(p) = num_hops; of `fixed_tree`,
    for each rank, parts(p, L) = num_subtrees and within(p, L) = num_within.

    Parameters
    ----------
    text : str
        The expression.
    defaults : mapping of str to int or Topology, optional
        The default values of the options.
    is_cost : bool
        Whether the value for one rank, which sends nothing, is 0 in any case, unless it combines
        shards.

    Examples
    --------
    >>> from collectives import algorithms
    >>> rounds = algorithms.Formula("q + N - 1", {"segments": 4})
    >>> rounds(p=6), rounds(p=6, segments=1)
    (6, 3)
    """

    def __init__(
        self, text: str, defaults: Mapping[str, Option] | None = None, *, is_cost: bool = False
    ) -> None:
        self.text, self.defaults, self._is_cost = text, dict(defaults or {}), is_cost

    def checked(self) -> Formula:
        """Return the formula itself.

        Raises
        ------
        ValueError
            If it has no value for two ranks.
        """
        try:
            self(p=2)
        except (SyntaxError, NameError, TypeError, LookupError, ArithmeticError) as error:
            raise ValueError(f"formula {self.text!r}: {error}") from None
        return self

    @cached_property
    def _code(self) -> CodeType:
        """The compiled text.  A program needs few of the formulas, and importing compiles none."""
        exact = ast.fix_missing_locations(_Exact().visit(ast.parse(self.text, mode="eval")))
        return compile(exact, f"<formula {self.text}>", "eval")

    def __call__(self, p: int, n: int = 0, **options: Option) -> int | Fraction:
        """Return the value for `p` ranks and `n` bytes; an int if it is whole."""
        if self._is_cost and p == 1 and not {**self.defaults, **options}.get("shards"):
            return 0
        logs = {"q": ceil_log2(p), "k": floor_log2(p), "P": 1 << floor_log2(p)}
        chosen = dict(_symbols(p, {**self.defaults, **options}))
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


def _symbols(p: int, options: Mapping[str, Option]) -> Iterator[tuple[str, int]]:
    """Yield the variables of the options."""
    for name, value in arguments(p, options).items():
        if isinstance(value, Topology):
            yield "g", value.max_per_host
            yield "H", value.num_hosts
        else:
            yield SYMBOLS[name], value


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
    "bine_hops": negabinary.num_hops,
    "parts": fixed_tree.num_subtrees,
    "within": fixed_tree.num_within,
}


class Counted(NamedTuple):
    """A cost without a formula: it is counted in the schedules of all ranks.

    It is called like a formula, and its value is also that of the worst root.
    """

    name: str
    collective: str
    function: Callable[..., Iterator[Round]]
    defaults: Mapping[str, Option]
    pieces: Formula

    def __call__(self, p: int, n: int = 0, **options: Option) -> int | Fraction:
        """Return the value for `p` ranks and `n` bytes."""
        settings = {**self.defaults, **options}
        case = Case(p, 0, checked_num_pieces(self.collective, self.pieces, p, settings))
        roots = range(p) if SPECS[self.collective].is_rooted else [None]
        given = tuple(settings.items())
        costs: list[int | Fraction] = [
            getattr(_counted(self.collective, self.function, case, n, root, given), self.name)
            for root in roots
        ]
        return max(costs)

    def __str__(self) -> str:
        return "counted"


@lru_cache(maxsize=128)  # the costs of an algorithm are asked for one after the other
def _counted(
    collective: str,
    function: Callable[..., Iterator[Round]],
    case: Case,
    n: int,
    root: int | None,
    settings: tuple[tuple[str, Option], ...],
) -> Counts:
    """Return all costs, for one root."""
    where = {} if root is None else {"root": root}
    given = {**where, **arguments(case.size, dict(settings))}
    schedules = [
        all_rounds(collective, function(rank, case.size, **given)) for rank in range(case.size)
    ]
    return count(schedules, even_sizes(collective, case, n))


class ForEvenHosts(NamedTuple):
    """A cost with a formula for hosts of equally many ranks; for other hosts it is counted."""

    formula: Formula
    counted: Counted

    def __call__(self, p: int, n: int = 0, **options: Option) -> int | Fraction:
        """Return the value for `p` ranks and `n` bytes."""
        hosts = topology_of(p, {**self.formula.defaults, **options}["per_host"])
        cost = self.formula if hosts.is_even else self.counted
        return cost(p, n, **options)

    def __str__(self) -> str:
        return str(self.formula)


Cost = Formula | Counted | ForEvenHosts


def checked_num_pieces(label: str, pieces: Formula, size: int, options: Mapping[str, Any]) -> int:
    """Return the number of pieces for `size` ranks.

    Raises ValueError if the number is not valid.
    """
    number = pieces(p=size, **options)
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"{label} cuts into {number} pieces")
    if number > MAX_PIECES:
        raise ValueError(f"{label} cuts into more than {MAX_PIECES} pieces on {size} rank(s)")
    return number


def all_rounds(label: str, rounds: Iterator[Round]) -> Schedule:
    """Return all rounds.

    Raises ValueError if there are too many; the function may never end.
    """
    schedule = list(islice(rounds, MAX_ROUNDS + 1))
    if len(schedule) > MAX_ROUNDS:
        raise ValueError(f"{label} has more than {MAX_ROUNDS} rounds")
    return schedule
