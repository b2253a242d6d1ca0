"""Traces that SimGrid's SMPI replays: for each rank, one action after the other, as text.

Clauss et al. 2011 ("Single node on-line simulation of MPI applications with SMPI"); the format is
that of SimGrid 3.32.  `smpirun -replay LIST -platform XML -np P` reads the file that LIST names,
which has the actions of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collectives.export.tasks import Task
from collectives.simulation import OTHER_HOST, Link, Machine

FLOPS = 1e9  # operations a second of a host of `platform`, in which traces count computation


def lines(ranks: Sequence[Sequence[Task]]) -> Iterator[str]:
    """Yield the lines of a trace for the tasks of all ranks.

    Sends and receives do not block; a rank waits for them where a later task needs their end.
    """
    for rank, tasks in enumerate(ranks):
        yield from (f"{rank} {action}" for action in _actions(rank, tasks))


def _actions(rank: int, tasks: Sequence[Task]) -> Iterator[str]:
    in_flight: dict[int, Task] = {}
    yield "init"
    for number, task in enumerate(tasks):
        needed = [before for before in task.after if before in in_flight]
        yield from _waits(rank, in_flight, needed)
        yield _action(task)
        if task.is_message:
            in_flight[number] = task
    yield from _waits(rank, in_flight, list(in_flight))
    yield "finalize"


def _waits(rank: int, in_flight: dict[int, Task], numbers: list[int]) -> Iterator[str]:
    """Yield the actions that wait for some of the messages in flight."""
    messages = [in_flight.pop(number) for number in numbers]
    if messages and not in_flight:
        yield "waitall"
        return
    for task in messages:
        ends = (rank, task.peer) if task.kind == "send" else (task.peer, rank)
        yield f"wait {ends[0]} {ends[1]} {task.tag}"


def _action(task: Task) -> str:
    if not task.is_message:
        return f"compute {task.seconds * FLOPS:.0f}"
    return f"{'isend' if task.kind == 'send' else 'irecv'} {task.peer} {task.tag} {task.size}"


def platform(size: int, machine: Machine) -> str:
    """Return a platform of SimGrid as XML: `size` hosts with one rank each, joined by a switch.

    Each host has a link of the latency and the bandwidth of `machine`'s links between hosts, in
    each direction.  The factors by which SimGrid corrects bandwidth and latency are set to 1, so
    that its model has the numbers of the machine and not those of another cluster.

    Parameters
    ----------
    size : int
    machine : Machine

    Raises
    ------
    ValueError
        If the machine has no links between hosts.
    """
    if OTHER_HOST not in machine.links:
        raise ValueError("the machine has no links between hosts, which a platform needs")
    links = machine.links[OTHER_HOST]
    config = {
        "smpi/bw-factor": "0:1",
        "smpi/lat-factor": "0:1",
        "network/TCP-gamma": "0",  # no limit by a window of TCP
        "network/weight-S": "0",  # links are shared equally, whatever their latency
        "smpi/os": _overheads(links),
        "smpi/ois": _overheads(links),
        "smpi/or": _overheads(links),
        "smpi/async-small-thresh": f"{_eager_bytes(links)}",
        "smpi/send-is-detached-thresh": f"{_eager_bytes(links)}",
    }
    props = "\n".join(f'    <prop id="{name}" value="{value}"/>' for name, value in config.items())
    last = links[-1]
    bandwidth = 1 / last.seconds_per_byte if last.seconds_per_byte else 1e18
    return (
        '<?xml version="1.0"?>\n'
        '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">\n'
        '<platform version="4.1">\n'
        f"  <config>\n{props}\n  </config>\n"
        f'  <cluster id="cluster" prefix="host-" suffix="" radical="0-{size - 1}"'
        f' speed="{FLOPS:.0f}f" bw="{bandwidth:.12g}Bps" lat="{last.latency_seconds / 2:.12g}s"'
        ' sharing_policy="SPLITDUPLEX"/>\n'
        "</platform>\n"
    )


def _overheads(links: Sequence[Link]) -> str:
    """Return the processor's time of a message, as SMPI writes it.

    The form is from:seconds:seconds per byte.
    """
    starts = [0.0, *(link.up_to_bytes + 1 for link in links[:-1])]
    return ";".join(
        f"{start:.0f}:{link.overhead_seconds:.12g}:{link.overhead_seconds_per_byte:.12g}"
        for start, link in zip(starts, links, strict=True)
    )


def _eager_bytes(links: Sequence[Link]) -> int:
    """Return the largest message that does not wait for its receive."""
    limits = [0.0, *(link.up_to_bytes for link in links if not link.is_rendezvous)]
    return int(min(max(limits), 2**31 - 1))
