"""One call of a collective, as the tasks of all ranks, or as an algorithm on blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from collectives.algorithms import Algorithm, Option
from collectives.export import msccl
from collectives.export.tasks import Task, tasks_of
from collectives.programs import Counts
from collectives.schedule import SPECS, Case, after, before
from collectives.selection import choose, even_parts, parse_default, programs
from collectives.simulation import Machine


class Call(NamedTuple):
    """A call of a collective.

    Attributes
    ----------
    collective : str
    size : int
        The number of ranks.
    num_bytes : int
        The n of the formulas: bytes of the whole vector; for all-to-all of one rank's input, for
        scatter, gather, all-gather and reduce-scatter of the parts of all ranks.
    algorithm : str, optional
        Its name; None: as a call chooses it without measured decisions.
    root : int
        The root of a rooted collective.
    itemsize : int
        The bytes of an element; vectors are divided at elements, as evenly as possible.

    Examples
    --------
    >>> from collectives.export import Call, machine_in
    >>> ranks = Call("all_reduce", 4, 1 << 20, "ring").tasks(machine_in(None))
    >>> [sum(task.size for task in tasks if task.kind == "send") for tasks in ranks]
    [1572864, 1572864, 1572864, 1572864]
    """

    collective: str
    size: int
    num_bytes: int
    algorithm: str | None = None
    root: int = 0
    itemsize: int = 1

    def tasks(self, machine: Machine) -> list[list[Task]]:
        """Return the tasks of each rank: a list of `Task` for rank 0, 1, ....

        Parameters
        ----------
        machine : Machine
            What copies and combinations cost.

        Raises
        ------
        ValueError
            If the algorithm cannot serve, or the bytes are not whole elements.
        """
        self._check()
        counts = even_parts(self.collective, self.size, self.num_bytes // self.itemsize)
        programs_by_rank = programs(
            self.collective,
            self.size,
            counts,
            itemsize=self.itemsize,
            algorithm=self.algorithm,
            root=self.root,
        )
        return tasks_of(programs_by_rank, machine)

    def msccl(self) -> str:
        """Return the algorithm as the text of an XML file of MSCCL, which serves other sizes too.

        Options that are not given are those of a call of `num_bytes`.

        Raises
        ------
        ValueError
            If the algorithm cannot serve, or exceeds a limit of MSCCL.
        """
        self._check()
        chosen = choose(
            self.collective, self.algorithm, self.size, self.num_bytes, itemsize=self.itemsize
        )
        options = {**chosen.options, **parse_default(self.collective, chosen.label).options}
        label = _label(chosen.algorithm, options)
        case = chosen.algorithm.case(self.size, self.root, **options)
        counts = _one_element_a_block(self.collective, case)
        programs_by_rank = programs(
            self.collective, self.size, counts, algorithm=label, root=self.root
        )
        ranks = tasks_of(programs_by_rank, Machine({}), joins_work=False)
        sizes = [
            (len(before(self.collective, rank, case)), len(after(self.collective, rank, case)))
            for rank in range(self.size)
        ]
        return msccl.xml(self.collective, label, ranks, sizes)

    def _check(self) -> None:
        """Raise ValueError for numbers that no call has."""
        if self.size < 1 or self.itemsize < 1:
            raise ValueError("a call has one rank or more, and elements of one byte or more")
        if self.num_bytes < 0 or self.num_bytes % self.itemsize:
            raise ValueError(f"{self.num_bytes} bytes are not elements of {self.itemsize} bytes")


def _label(algorithm: Algorithm, options: Mapping[str, Option]) -> str:
    """Return the algorithm with its options that are numbers; the hosts are those of a call."""
    numbers = {name: value for name, value in options.items() if isinstance(value, int)}
    given = ", ".join(f"{name}={value}" for name, value in numbers.items())
    return f"{algorithm.name}({given})" if given else algorithm.name


def _one_element_a_block(collective: str, case: Case) -> Counts:
    """Return the counts of a call in which every block, or piece of a block, is one element."""
    if SPECS[collective].has_pieces:
        return case.num_pieces
    return even_parts(collective, case.size, case.num_pieces * case.size)
