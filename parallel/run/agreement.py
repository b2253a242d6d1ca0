"""Check that all ranks train the same model in the same way, and raise errors on all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from collectives import Communicator
from parallel.accounts import PhaseFunction, PredictedCall
from parallel.layout import Layout, RankView, views_of_parts
from parallel.nn import on_host
from parallel.optim import Optimizer
from parallel.run.arrays import RankArrays
from parallel.step import lower

DIGEST_BYTES = 32
REPORT = np.dtype([("doing", "S64"), ("why", "S448")])  # of a rank; `why` is empty if it succeeded
PLAIN = bool, int, float, str, type(None), np.dtype


class ModelMismatch(ValueError):  # noqa: N818 - named like the errors of `collectives`
    """Ranks have different models or options before the first step; the message names them."""


def digest(*values: Any) -> bytes:
    """Return the SHA-256 of arrays' bytes and other values' `repr`: `DIGEST_BYTES` bytes."""
    sha = hashlib.sha256()
    for value in values:
        sha.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return sha.digest()


def digest_of(arrays: RankArrays, unit: str) -> bytes:
    """Return the digest of a unit's names and shapes, and of its initial values if compared."""
    view = arrays.view
    model, seed = view.model, view.recipe.seed
    shapes = [(name, spec.shape) for name, spec in model.units[unit].items()]
    if view.layout.is_divided:
        return digest(model.units[unit], seed)  # these determine the values
    if view.sharding.broadcast_algorithm is not None:
        return digest(shapes)
    if "parameters" in view.sharding.divided:  # the values of the whole unit
        return digest(shapes, model.draw(unit, seed))
    return digest(shapes, on_host(arrays.parameters[unit]))


def make_communicators(layout: Layout) -> None:
    """Make the communicators along all axes now, and not in the middle of the first step.

    First check that all ranks make the same communicators: others would wait forever.
    """
    mesh = layout.mesh
    used = (action.axes for view in views_of_parts(layout) for action in lower(view))
    of_units = (axes for sharding in layout.shardings.values() for axes in sharding.groups)
    of_layers = ((axis,) for axis in layout.model.comm_axes)
    all_axes = (*layout.sharding.groups, *of_units, *filter(None, used), *of_layers)
    distinct = list(dict.fromkeys(all_axes))
    if mesh.comm is not None:
        check_same(mesh.comm, {}, {"axes": distinct})
    for axes in distinct:
        mesh[axes]


def options_of_run(view: RankView, optimizer: Optimizer) -> dict[str, Any]:
    """Return what must be equal on all ranks, because their calls depend on it."""
    model, recipe = view.model, view.recipe
    return {
        "mesh": view.mesh.axes,
        "algorithm": view.layout.algorithm,
        "dtype": view.dtype.name,
        "schedule": [list(map(str, row)) for row in view.stages.schedule.actions],
        "num_micro_batches": recipe.num_micro_batches,
        "clip": recipe.clip,
        "reduce_dtype": recipe.reduce_dtype,
        "optimizer": options_of(optimizer),
        "hook": options_of(view.sharding.reduction),
        "gather": options_of(view.sharding.gather),
        # A layer that sends, and runs again, sends again.
        "recompute": model.recompute if model.mesh.size > 1 else (),
        "layers": [[name, *layer.config()] for name, layer in model.layers.items()]
        + sorted(map(list, model.ties.items())),
    } | view.sharding.config()


def options_of(thing: object) -> list[Any]:
    """Return the class name and the attributes of an optimizer or a hook, for `digest`."""
    return [type(thing).__name__, sorted((name, plain(x)) for name, x in vars(thing).items())]


def plain(value: object) -> Any:
    """Return a value whose `repr` is the same on all ranks; for an array or object, its type."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    return value if isinstance(value, PLAIN) else type(value).__name__


def check_same(comm: Communicator, units: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise ModelMismatch on all ranks unless all have the same values.  All ranks call this."""
    both = units | {f"option {name}": value for name, value in options.items()}
    counts = comm.all_gather(np.array([[len(units), len(options)]]), algorithm="ring")
    if (counts[:, 0] != counts[0, 0]).any():
        raise ModelMismatch(f"ranks have models of {counts[:, 0].tolist()} layers")
    if (counts[:, 1] != counts[0, 1]).any():
        raise ModelMismatch("ranks train by different strategies, with different options")
    mine = np.frombuffer(b"".join(map(digest, both.values())), np.uint8)
    table = comm.all_gather(mine[None], algorithm="ring").reshape(comm.size, -1, DIGEST_BYTES)
    differs = zip(both, (table != table[0]).any(axis=2).T, strict=True)
    different = [f"{name} of {format_ranks(ranks)}" for name, ranks in differs if ranks.any()]
    if different:
        what = "shapes or initial values of layers, or options, differ from rank 0's"
        raise ModelMismatch(f"{what}: {', '.join(different)}")


@contextmanager
def raise_on_all_ranks(
    comm: Communicator | None,
    phase: PhaseFunction,
    label: str,
    doing: str,
    failure: type[Exception],
) -> Iterator[None]:
    """Return a context manager that raises `failure` on all ranks if its block fails on some.

    All ranks of `comm` enter the block.  At its end they tell each other, in phase `label` of the
    ledger, whether it succeeded.  `doing` describes the block and must be the same on all ranks.
    """
    why, cause = "", None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the other ranks must learn of any error
        why, cause = str(error) or repr(error), error
    reports = np.array([(doing.encode(errors="replace"), why.encode(errors="replace"))], REPORT)
    if comm is not None:
        with phase(label):
            table = comm.all_gather(reports.view(np.uint8)[None], algorithm="ring")
        reports = table.view(REPORT)[:, 0]
    if (reports["doing"] != reports["doing"][0]).any():
        raise failure(f"ranks are doing different things: {by_rank(reports['doing'])}")
    if reports["why"].any():
        raise failure(f"{doing} failed: {by_rank(reports['why'])}") from cause


def by_rank(texts: np.ndarray[Any, Any]) -> str:
    """Return the texts of ranks, without empty ones: "rank 1: this; ranks 0, 2: that"."""
    distinct = [text for text in dict.fromkeys(texts.tolist()) if text]
    return "; ".join(f"{format_ranks(texts == x)}: {x.decode(errors='ignore')}" for x in distinct)


def format_ranks(is_listed: np.ndarray[Any, Any]) -> str:
    """Return the ranks whose entry is true: "rank 1", "ranks 0, 2"."""
    ranks = [str(rank) for rank in np.flatnonzero(is_listed)]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


def start_check(comm: Communicator, num_units: int, num_options: int) -> list[PredictedCall]:
    """Return what `check_same` sends before the first step among the ranks of `comm`."""
    sizes = [16, DIGEST_BYTES * (num_units + num_options)]
    return [
        PredictedCall("start/check", "all_gather", "ring", (n,) * comm.size, axis=comm.name)
        for n in sizes
    ]
