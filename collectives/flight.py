"""Line up what the ranks of a job were doing: ``python -m collectives.flight DIR``.

DIR holds the dumps of a job that was started with COLLECTIVES_FLIGHT=DIR in its environment: a
rank writes one when a wait runs out of time or fails, and when it gets SIGUSR1.  Of each call that
is under way somewhere this says who waits for whom, who has not called it, and where that rank is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Call = dict[str, Any]
Group = tuple[tuple[int, ...], int]  # ranks of the job, and which communicator of these ranks


def read(directory: str | Path) -> dict[int, dict[str, Any]]:
    """The dumps in a directory, by rank of the job.  Raises ValueError for what is no dump."""
    dumps = {}
    for path in sorted(Path(directory).glob("flight.*.json")):
        try:
            dump = json.loads(path.read_bytes())
            dumps[int(dump["rank"])] = dump
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not the dump of a flight recorder: {error!r}") from None
    return dumps


def lines(dumps: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """What the dumps say together, line by line."""
    under_way = 0
    for group, calls in sorted(_groups(dumps).items()):
        for name in _under_way(calls):
            under_way += 1
            yield from _about(name, group, calls, dumps)
    if not under_way:
        yield "no call is under way"
        yield from (f"  rank {rank}: {_last(dump['calls'], dump)}" for rank, dump in dumps.items())


def _groups(dumps: Mapping[int, Mapping[str, Any]]) -> dict[Group, dict[int, dict[str, Call]]]:
    """The calls by communicator, then by rank of the job, then by what they are called."""
    groups: dict[Group, dict[int, dict[str, Call]]] = {}
    for rank, dump in dumps.items():
        for call in dump["calls"]:
            group = tuple(call["members"]), call["ordinal"]
            groups.setdefault(group, {}).setdefault(rank, {})[call["call"]] = call
    return groups


def _under_way(calls: Mapping[int, Mapping[str, Call]]) -> list[str]:
    """The names of the calls that are under way on some rank, the oldest first."""
    started: dict[str, float] = {}
    for each in calls.values():
        for name, call in each.items():
            if call["state"] == "under way":
                started[name] = max(started.get(name, 0.0), call["seconds_ago"])
    return sorted(started, key=lambda name: -started[name])


def _about(
    name: str,
    group: Group,
    calls: Mapping[int, Mapping[str, Call]],
    dumps: Mapping[int, Mapping[str, Any]],
) -> Iterator[str]:
    """One call that is under way, rank by rank."""
    members, ordinal = group
    which = f"ranks {', '.join(map(str, members))}" + (f" (#{ordinal})" if ordinal > 1 else "")
    kinds = {
        f"{each[name]['collective']} ({each[name]['algorithm']})"
        for each in calls.values()
        if name in each
    }
    yield f"call {name} of {which}: {' or '.join(sorted(kinds))}"
    for rank in members:
        yield f"  rank {rank}: {_state(name, members, calls.get(rank, {}), dumps.get(rank))}"


def _state(
    name: str, members: Sequence[int], calls: Mapping[str, Call], dump: Mapping[str, Any] | None
) -> str:
    """How one rank stands to a call.  Its calls of this communicator, and all that it dumped."""
    if dump is None:
        return "no dump: it is dead, stopped, or was not asked"
    if name not in calls:
        return f"has not called it; {_last(list(calls.values()), dump)}"
    call = calls[name]
    if call["state"] != "under way":
        return f"its call is {call['state']}; {_last(list(calls.values()), dump)}"
    waits = [
        f"for a message from rank {members[peer]}" if is_receive else f"for rank {members[peer]}"
        for peer, is_receive in call["waiting_for"]
    ]
    where = f"round {call['round']} of {call['among']}"
    waiting = f"waits in {where} {' and '.join(waits)}" if waits else f"works in {where}"
    return f"{waiting}, since {call['seconds_ago']:.3g} s; {_at(dump)}"


def _last(calls: Sequence[Call], dump: Mapping[str, Any]) -> str:
    """The last of these calls, and where the rank is."""
    if not calls:
        return f"it has called nothing there; {_at(dump)}"
    call = calls[-1]
    what = f"{call['call']}, {call['collective']}, {call['state']}, {call['seconds_ago']:.3g} s ago"
    return f"its last call is {what}; {_at(dump)}"


def _at(dump: Mapping[str, Any]) -> str:
    return f"it is at {dump['at'][-1]}" if dump["at"] else "where it is, is not known"


def main(argv: Sequence[str] | None = None) -> int:
    """Print what the dumps say.  Exit status 2 if there are none that can be read."""
    parser = argparse.ArgumentParser("python -m collectives.flight", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("directory", type=Path, help="where the dumps are")
    directory = parser.parse_args(argv).directory
    try:
        dumps = read(directory)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    if not dumps:
        parser.exit(2, f"{directory} holds no dumps: flight.<rank>.json\n")
    sys.stdout.writelines(f"{line}\n" for line in lines(dumps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
