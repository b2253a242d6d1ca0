"""Whether all ranks train the same model in the same way; and all hear of what fails on some."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from collectives import Communicator
from parallel.nn import Spec
from parallel.traffic import PredictedCall

DIGEST = 32  # bytes
REPORT = np.dtype([("doing", "S64"), ("why", "S448")])  # of a rank: why it failed, or nothing
PLAIN = bool, int, float, str, type(None), np.dtype
Digests = dict[str, bytes]


class ModelsDiffer(ValueError):  # noqa: N818 - as the others of its kind are named
    """Ranks begin with different models or options.  The message says which, of which ranks."""


def digest(*told: Any) -> bytes:
    """Of what can be told in words, and of arrays on the host: DIGEST bytes."""
    sha = hashlib.sha256()
    for each in told:
        sha.update(each.tobytes() if isinstance(each, np.ndarray) else repr(each).encode())
    return sha.digest()


def shapes_of(specs: Mapping[str, Spec]) -> list[Any]:
    """The names and shapes of a unit's parameters."""
    return [(name, spec.shape) for name, spec in specs.items()]


def options_of(thing: object) -> list[Any]:
    """What an optimizer or a hook was told, and what it is."""
    told = {name: plain(value) for name, value in vars(thing).items()}
    return [type(thing).__name__, sorted(told.items())]


def plain(value: object) -> Any:
    """A value as it reads alike on all ranks; of an array or an object only what it is."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    return value if isinstance(value, PLAIN) else type(value).__name__


def check_alike(comm: Communicator, units: Digests, options: Digests) -> None:
    """Raise ModelsDiffer, on all ranks, unless all bring the same.  All ranks call this."""
    both = units | {f"option {name}": each for name, each in options.items()}
    counts = comm.all_gather(np.array([[len(units), len(options)]]), algorithm="ring")
    if (counts[:, 0] != counts[0, 0]).any():
        raise ModelsDiffer(f"ranks have models of {counts[:, 0].tolist()} layers")
    if (counts[:, 1] != counts[0, 1]).any():
        raise ModelsDiffer("ranks train by different strategies, with different options")
    mine = np.frombuffer(b"".join(both.values()), np.uint8)
    table = comm.all_gather(mine[None], algorithm="ring").reshape(comm.size, -1, DIGEST)
    differs = (table != table[0]).any(axis=2)
    said = [
        f"{name} of {ranks_in_words(differs[:, i])}"
        for i, name in enumerate(both) if differs[:, i].any()
    ]  # fmt: skip
    if said:
        what = "shapes or initial values of layers, or options, differ from rank 0's"
        raise ModelsDiffer(f"{what}: {', '.join(said)}")


@contextmanager
def together(
    comm: Communicator | None,
    phase: Callable[[str], AbstractContextManager[None]],
    label: str,
    doing: str,
    failure: type[Exception],
) -> Iterator[None]:
    """What fails inside on some ranks is raised on all, after all have come to the end.

    `doing`: in words what it is, the same on all ranks.  The reports are sent in phase `label`.
    """
    why, cause = "", None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
        why, cause = str(error) or repr(error), error
    reports = np.array([(doing.encode(), why.encode(errors="replace"))], REPORT)
    if comm is not None:
        with phase(label):
            table = comm.all_gather(reports.view(np.uint8)[None], algorithm="ring")
        reports = table.view(REPORT)[:, 0]
    if (reports["doing"] != reports["doing"][0]).any():
        raise failure(f"ranks do not do the same: {by_rank(reports['doing'])}")
    if reports["why"].any():
        raise failure(f"{doing} failed: {by_rank(reports['why'])}") from cause


def by_rank(texts: np.ndarray[Any, Any]) -> str:
    """What ranks say, unless it is nothing: "rank 1: this; ranks 0, 2: that"."""
    said = [text for text in dict.fromkeys(texts.tolist()) if text]
    return "; ".join(f"{ranks_in_words(texts == x)}: {x.decode(errors='ignore')}" for x in said)


def traffic(phase: str, size: int, num_units: int, num_options: int) -> list[PredictedCall]:
    """What `check_alike` sends among so many ranks."""
    calls = [16 * size, DIGEST * (num_units + num_options) * size]
    return [PredictedCall(phase, "all_gather", "ring", n) for n in calls]


def ranks_in_words(is_one: Any) -> str:
    """Those for which the entry is true: "rank 1", "ranks 0, 2"."""
    ranks = [str(rank) for rank in np.flatnonzero(is_one)]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
