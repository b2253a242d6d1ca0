"""MSCCL's XML, which its runtime runs on GPUs: thread blocks of steps that wait for each other.

Cowan et al. 2023 ("MSCCLang"); the parser and the interpreter are in github.com/microsoft/msccl.
The thread blocks of a GPU run side by side.  Each runs its steps in order, and sends to one peer at
most and receives from one.  A step may wait for a step of another thread block.  Places are counted
in equal blocks of the input, the output and scratch memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from collectives.export.fusion import Joined, Place, joined, left, right, target
from collectives.export.tasks import Task
from collectives.programs import INPUT, OUTPUT, SCRATCH, Kind

COLLECTIVES = {  # and the runtime's names
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "all_to_all": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
}
BUFFERS = {INPUT: "i", OUTPUT: "o", SCRATCH: "s"}
NOWHERE = Place(INPUT, -1, -1)

# Limits of the runtime, in its `msccl.h` and `devcomm.h`.
MAX_STEPS = 256  # of a thread block
MAX_COUNT = 71  # blocks of a step
MAX_PEERS = 32  # of a channel
MAX_CHANNELS = 32
MAX_THREAD_BLOCKS = 216
MAX_ELEMENTS = 4000  # of the XML of a rank; the parser has 4096 for these and what is around them

Key = tuple[int, int, int]  # of a thread block: the peers (-1: none), and the channel
LOCAL: Key = (-1, -1, 0)  # copies and combines, and sends nothing


class Ends(NamedTuple):
    """Both ends of a message: what is sent, and where it is received."""

    source: Place
    into: Place


class Step(NamedTuple):
    """A step of a thread block.

    Attributes
    ----------
    wait : tuple or None
        The thread block and the number of the step that must have ended.
    """

    type: str
    source: Place = NOWHERE
    into: Place = NOWHERE
    wait: tuple[Key, int] | None = None


class Gpu:
    """The thread blocks of one rank, as they are filled."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.blocks: dict[Key, list[Step]] = {}
        self.place_of: dict[int, tuple[Key, int]] = {}  # the last step of each task
        self.waited: dict[tuple[Key, Key], int] = {}  # the last step that a block has waited for

    def add(self, task: Task, number: int, needs: Iterable[int], steps: list[Step]) -> None:
        """Add the steps of a task, and `nop`s if it waits for several others."""
        key = self.key(task)
        block = self.blocks.setdefault(key, [])
        waits = self.waits(key, needs)
        block += (Step("nop", wait=wait) for wait in waits[1:])
        first, *others = (piece for step in steps for piece in pieces(step))
        block += (first._replace(wait=waits[0] if waits else None), *others)
        self.place_of[number] = key, len(block) - 1

    def key(self, task: Task) -> Key:
        """Return the thread block of a task.

        Sends and receives of a channel have their own each.
        """
        if not task.is_message:
            return LOCAL
        if task.kind == "send":
            return task.peer, -1, self.channel(self.rank, task.peer)
        return -1, task.peer, self.channel(task.peer, self.rank)

    def channel(self, source: int, destination: int) -> int:
        """Return the channel of the messages between two ranks, so that none has too many peers."""
        return ((destination - source) % self.size - 1) // MAX_PEERS

    def waits(self, key: Key, needs: Iterable[int]) -> list[tuple[Key, int]]:
        """Return the steps to wait for.

        They are the last of each other thread block, unless it is known to end.
        """
        last: dict[Key, int] = {}
        for number in needs:
            other, step = self.place_of[number]
            if other != key and step > max(last.get(other, -1), self.waited.get((key, other), -1)):
                last[other] = step
        self.waited.update(((key, other), step) for other, step in last.items())
        return list(last.items())


def pieces(step: Step) -> Iterator[Step]:
    """Yield the step, or several steps for more blocks than one step may have."""
    num_blocks = step.into.stop - step.into.start
    for start in range(0, num_blocks, MAX_COUNT):
        stop = min(start + MAX_COUNT, num_blocks)
        yield step._replace(
            source=_part(step.source, start, stop), into=_part(step.into, start, stop)
        )


def _part(place: Place, start: int, stop: int) -> Place:
    return place._replace(start=place.start + start, stop=place.start + stop)


def gpus(ranks: Sequence[Sequence[Task]]) -> list[Gpu]:
    """Return the thread blocks of all ranks, for tasks of programs whose elements are blocks."""
    ends = _ends(ranks)
    return [_gpu(rank, tasks, ends, len(ranks)) for rank, tasks in enumerate(ranks)]


def _ends(ranks: Sequence[Sequence[Task]]) -> dict[tuple[int, int, int], Ends]:
    """Return both ends of every message, by its source, destination and tag."""
    sources = {
        (rank, task.peer, task.tag): target(task.row)
        for rank, tasks in enumerate(ranks)
        for task in tasks
        if task.kind == "send" and task.row is not None
    }
    return {
        name: Ends(sources[name], target(task.row))
        for rank, tasks in enumerate(ranks)
        for task in tasks
        if task.kind == "receive" and task.row is not None
        for name in [(task.peer, rank, task.tag)]
    }


def _gpu(
    rank: int, tasks: Sequence[Task], ends: Mapping[tuple[int, int, int], Ends], size: int
) -> Gpu:
    gpu, joins = Gpu(rank, size), joined(tasks)
    by_receive = {join.receive: join for join in joins.values()}
    # The tasks whose end means that a task has ended: a joined one is its receive, and what else
    # it would have waited for.
    meaning: dict[int, tuple[int, ...]] = {}
    for number, task in enumerate(tasks):
        needs = dict.fromkeys(n for before in task.after for n in meaning[before])
        if number in joins:
            meaning[number] = tuple(dict.fromkeys((joins[number].receive, *needs)))
            continue
        join = by_receive.get(number)
        steps = _steps(rank, task, ends, join)
        gpu.add(task, number, (*needs, *(join.extra if join else ())), steps)
        meaning[number] = (number,)
    return gpu


def _steps(
    rank: int, task: Task, ends: Mapping[tuple[int, int, int], Ends], join: Joined | None
) -> list[Step]:
    """Return the steps of a task."""
    assert task.row is not None
    if task.kind == "send":
        return [Step("s", *ends[rank, task.peer, task.tag])]
    if join is not None:
        return [Step("rrc", join.own, join.into)]
    if task.kind == "receive":
        return [Step("r", *ends[task.peer, rank, task.tag])]
    into = target(task.row)
    if task.row.kind == Kind.COPY:
        return [Step("cpy", left(task.row), into)]
    return _combination(left(task.row), right(task.row), into)


def _combination(a: Place, b: Place, into: Place) -> list[Step]:
    """Return the steps that combine two operands: `re` adds its source to its destination."""
    if into in (a, b):
        return [Step("re", b if into == a else a, into)]
    return [Step("cpy", a, into), Step("re", b, into)]


def xml(
    collective: str, name: str, ranks: Sequence[Sequence[Task]], sizes: Sequence[tuple[int, int]]
) -> str:
    """Return the text of a file.

    Parameters
    ----------
    name : str
        The name of the algorithm.
    ranks : sequence of sequences of Task
        The tasks of all ranks, of programs whose elements are blocks.
    sizes : sequence of (int, int)
        The blocks of each rank's input and output.

    Raises
    ------
    ValueError
        For a collective that the runtime does not know, and for more than the runtime can take.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"MSCCL has no {collective}; it has {', '.join(COLLECTIVES)}")
    gpus_by_rank = gpus(ranks)
    check_limits(gpus_by_rank)
    root = Element(
        "algo",
        {
            "name": name,
            "proto": "Simple",
            "nchannels": str(_num_channels(gpus_by_rank)),
            "nchunksperloop": str(max(map(max, sizes))),
            "ngpus": str(len(ranks)),
            "coll": COLLECTIVES[collective],
            "inplace": "0",
        },
    )
    for gpu, (num_input, num_output) in zip(gpus_by_rank, sizes, strict=True):
        _write(
            SubElement(
                root,
                "gpu",
                {
                    "id": str(gpu.rank),
                    "i_chunks": str(num_input),
                    "o_chunks": str(num_output),
                    "s_chunks": str(_num_scratch(gpu)),
                },
            ),
            gpu,
        )
    indent(root)
    return tostring(root, encoding="unicode").replace(" />", "/>") + "\n"


def check_limits(gpus_by_rank: Sequence[Gpu]) -> None:
    """Raise ValueError for more than the runtime can take."""
    lengths = [[len(block) for block in gpu.blocks.values()] for gpu in gpus_by_rank]
    numbers = {
        "steps in a thread block": (max(max(steps, default=0) for steps in lengths), MAX_STEPS),
        "thread blocks": (max(map(len, lengths)), MAX_THREAD_BLOCKS),
        "steps of a rank": (max(map(sum, lengths)), MAX_ELEMENTS),
        "channels": (_num_channels(gpus_by_rank), MAX_CHANNELS),
    }
    for what, (number, most) in numbers.items():
        if number > most:
            raise ValueError(f"MSCCL takes {most} {what} at most; this algorithm has {number}")


def _num_channels(gpus_by_rank: Sequence[Gpu]) -> int:
    return max((key[2] for gpu in gpus_by_rank for key in gpu.blocks), default=0) + 1


def _num_scratch(gpu: Gpu) -> int:
    """Return the blocks of scratch memory that a rank uses."""
    places = (step.into for block in gpu.blocks.values() for step in block if step.type != "s")
    return max((place.stop for place in places if place.buffer == SCRATCH), default=0)


def _write(element: Element, gpu: Gpu) -> None:
    """Add the thread blocks of a rank to its element."""
    ids = {key: number for number, key in enumerate(sorted(gpu.blocks))}
    waited_for = {step.wait for block in gpu.blocks.values() for step in block}
    for key, number in ids.items():
        send, receive, channel = map(str, key)
        block = SubElement(
            element, "tb", {"id": str(number), "send": send, "recv": receive, "chan": channel}
        )
        for index, step in enumerate(gpu.blocks[key]):
            other, ended = (-1, -1) if step.wait is None else (ids[step.wait[0]], step.wait[1])
            SubElement(
                block,
                "step",
                {
                    "s": str(index),
                    "type": step.type,
                    "srcbuf": BUFFERS[step.source.buffer],
                    "srcoff": str(step.source.start),
                    "dstbuf": BUFFERS[step.into.buffer],
                    "dstoff": str(step.into.start),
                    "cnt": str(step.into.stop - step.into.start),
                    "depid": str(other),
                    "deps": str(ended),
                    "hasdep": str(int((key, index) in waited_for)),
                },
            )
