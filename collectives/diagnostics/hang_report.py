"""Report where the ranks of a job hang.

DIR contains the dumps of a job that was started with COLLECTIVES_FLIGHT=DIR in its environment.  A
rank writes a dump when a wait times out or fails, and when it gets SIGUSR1.  For each call that is
in progress on some rank, the report says who waits for whom, who has not made the call, and where
in the program that rank is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Call = Mapping[str, Any]
Dump = Mapping[str, Any]  # as `FlightRecorder.report` makes it
Group = tuple[tuple[int, ...], int]  # ranks of the job, and which communicator of these ranks

_IN_PROGRESS = "under way", "enqueued"  # states of calls
_SAME_TIME = 2.0  # seconds between dumps that were asked for together
_NAME = re.compile(r"flight\.(0|[1-9][0-9]{0,8})\.json")


def files(directory: str | Path, since: float = 0.0) -> list[Path]:
    """Return the files in a directory that are named like dumps and are not older than `since`.

    Raises OSError if the directory cannot be read.
    """
    entries = (path for path in Path(directory).iterdir() if path.match("flight.*.json"))
    return sorted(path for path in entries if _is_as_new(path, since))


def _is_as_new(path: Path, since: float) -> bool:
    try:
        return path.stat().st_mtime >= since - 0.01  # file times are coarse
    except OSError:
        return since <= 0.0  # a broken link, or just being replaced


def rank_of(path: Path) -> int | None:
    """Return the rank in the name of a dump; None if it is not the name of a dump."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def read(paths: Iterable[Path]) -> tuple[dict[int, Dump], list[str]]:
    """Return the dumps in files, by rank, and a sentence for each file that is not a dump."""
    dumps, faults = {}, []
    for path in paths:
        try:
            dump = _read(path)
        except ValueError as error:
            faults.append(escaped(f"{path} is not the dump of a flight recorder: {error}"))
        else:
            dumps[dump["rank"]] = dump
    return dict(sorted(dumps.items())), faults


def _read(path: Path) -> Dump:
    """Return the dump in a file.

    Raises ValueError, with the reason, if the file is not a dump.
    """
    rank = rank_of(path)
    if rank is None:
        raise ValueError("its name is not flight.<rank>.json")
    try:
        if not path.is_file():  # reading a pipe could block
            raise ValueError("it is not a file")
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from None
    try:
        dump = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    check(dump)
    if dump["rank"] != rank:
        raise ValueError(f"it is the dump of rank {dump['rank']}")
    return dump  # type: ignore[no-any-return]


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e12  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_text, value))


def _are_ranks(value: object) -> bool:
    is_list = isinstance(value, list | tuple) and all(map(_is_number, value))
    return is_list and len(set(value)) == len(value)  # type: ignore[arg-type, call-overload]


def _are_waits(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(wait, list | tuple)
        and len(wait) == 2
        and _is_number(wait[0])
        and isinstance(wait[1], bool)
        for wait in value
    )


def _is_state(value: object) -> bool:
    return isinstance(value, str) and value in ("complete", "failed", *_IN_PROGRESS)


Fields = Mapping[str, tuple[Callable[[object], bool], str]]

_DUMP: Fields = {
    "rank": (_is_number, "a rank"),
    "calls": (_is_list, "a list"),
    "at": (_are_texts, "a list of texts"),
}
_CALL: Fields = {
    "members": (_are_ranks, "a list of different ranks"),
    "ordinal": (_is_number, "a number"),
    "call": (_is_text, "a text"),
    "collective": (_is_text, "a text"),
    "algorithm": (_is_text, "a text"),
    "seconds_ago": (_is_seconds, "a time in seconds"),
    "state": (_is_state, "the state of a call"),
}
_UNDER_WAY: Fields = {
    "round": (_is_number, "a number"),
    "num_rounds": (_is_text, "a text"),
    "waiting_for": (_are_waits, "a list of ranks and directions"),
    "device_row": (_is_text, "a text"),
}


def check(dump: object) -> None:
    """Raise ValueError if this is not a report of `FlightRecorder.report`."""
    checked = _checked("the dump", dump, _DUMP)
    for number, value in enumerate(checked["calls"]):
        what = f"call {number}"
        call = _checked(what, value, _CALL)
        if checked["rank"] not in call["members"]:
            raise ValueError(f"{what} is of ranks to which rank {checked['rank']} does not belong")
        if "waiting_for" in call or call["state"] == "under way":
            waits = _checked(what, call, _UNDER_WAY)["waiting_for"]
            if any(peer >= len(call["members"]) for peer, _ in waits):
                raise ValueError(f"{what} waits for a rank that its communicator does not have")


def _checked(what: str, value: object, fields: Fields) -> Mapping[str, Any]:
    """Return the value, if it is a mapping with these fields."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is not an object with fields")
    for name, (is_right, kind) in fields.items():
        if name not in value:
            raise ValueError(f"{what} has no field {name!r}")
        if not is_right(value[name]):
            raise ValueError(f"the field {name!r} of {what} is not {kind}")
    return value


def lines(dumps: Mapping[int, Dump]) -> Iterator[str]:
    """Yield the lines of the report, as they may be printed.

    Raises ValueError if a dump is malformed.
    """
    for rank, dump in dumps.items():
        try:
            check(dump)
        except ValueError as error:
            raise ValueError(f"the dump of rank {rank} is malformed: {error}") from None
    yield from map(escaped, _lines(dumps))


def escaped(text: str) -> str:
    """Return the text, with Python's escape sequences for what could control a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _lines(dumps: Mapping[int, Dump]) -> Iterator[str]:
    under_way = 0
    yield from _outdated(dumps)
    for group, calls in sorted(_groups(dumps).items()):
        for name in _under_way(calls):
            under_way += 1
            yield from _about(name, group, calls, dumps)
    if not under_way:
        yield "no call is under way"
        yield from (f"  rank {rank}: {_last(dump['calls'], dump)}" for rank, dump in dumps.items())


def _outdated(dumps: Mapping[int, Dump]) -> Iterator[str]:
    """Yield a line for each dump that does not show the same time as the others."""
    times = {rank: dump["time"] for rank, dump in dumps.items() if _is_seconds(dump.get("time"))}
    for rank, written in times.items():
        if (age := max(times.values()) - written) > _SAME_TIME:
            yield f"the dump of rank {rank} is {age:.3g} s older than the latest one"


def _groups(dumps: Mapping[int, Dump]) -> dict[Group, dict[int, dict[str, Call]]]:
    """Return the calls by communicator, then by rank of the job, then by name."""
    groups: dict[Group, dict[int, dict[str, Call]]] = {}
    for rank, dump in dumps.items():
        for call in dump["calls"]:
            group = tuple(call["members"]), call["ordinal"]
            groups.setdefault(group, {}).setdefault(rank, {})[call["call"]] = call
    return groups


def _under_way(calls: Mapping[int, Mapping[str, Call]]) -> list[str]:
    """Return the names of the calls that are in progress on some rank, the oldest first."""
    started: dict[str, float] = {}
    for calls_of_rank in calls.values():
        for name, call in calls_of_rank.items():
            if call["state"] in _IN_PROGRESS:
                started[name] = max(started.get(name, 0.0), call["seconds_ago"])
    return sorted(started, key=lambda name: -started[name])


def _about(
    name: str, group: Group, calls: Mapping[int, Mapping[str, Call]], dumps: Mapping[int, Dump]
) -> Iterator[str]:
    """Yield the lines for one call that is in progress."""
    members, ordinal = group
    which = f"ranks {', '.join(map(str, members))}" + (f" (#{ordinal})" if ordinal > 1 else "")
    kinds = {
        f"{calls_of_rank[name]['collective']} ({calls_of_rank[name]['algorithm']})"
        for calls_of_rank in calls.values()
        if name in calls_of_rank
    }
    yield f"call {name} of {which}: {' or '.join(sorted(kinds))}"
    for rank in members:
        yield f"  rank {rank}: {_state(name, members, calls.get(rank, {}), dumps.get(rank))}"


def _state(name: str, members: Sequence[int], calls: Mapping[str, Call], dump: Dump | None) -> str:
    """Return the state of a call on one rank.

    `calls` has the rank's calls on this communicator.
    """
    if dump is None:
        return "no dump: it is dead or stopped, or has not been asked"
    if name not in calls:
        return f"has not called it; {_last(list(calls.values()), dump)}"
    call = calls[name]
    if call["state"] not in _IN_PROGRESS or "waiting_for" not in call:
        return f"its call is {call['state']}; {_last(list(calls.values()), dump)}"
    waits = [
        f"for a message from rank {members[peer]}" if is_receive else f"for rank {members[peer]}"
        for peer, is_receive in call["waiting_for"]
    ]
    where = f"round {call['round']} of {call['num_rounds']}"
    if call["device_row"]:
        where += f", {call['device_row']}"
    waiting = f"waits in {where} {' and '.join(waits)}" if waits else f"works in {where}"
    return f"{waiting}, since {call['seconds_ago']:.3g} s; {_at(dump)}"


def _last(calls: Sequence[Call], dump: Dump) -> str:
    """Return the last of these calls, and the rank's place in the program."""
    if not calls:
        return f"it has made no call there; {_at(dump)}"
    call = calls[-1]
    what = f"{call['call']}, {call['collective']}, {call['state']}, {call['seconds_ago']:.3g} s ago"
    return f"its last call is {what}; {_at(dump)}"


def _at(dump: Dump) -> str:
    return f"it is at {dump['at'][-1]}" if dump["at"] else "its place is not known"
