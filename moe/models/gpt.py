"""A small GPT, some of whose MLPs are mixtures of experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from moe.gates import GATES, Gate
from moe.layers import MixtureOfExperts, SumOfLayers
from moe.routing import RoutingLog
from parallel import Mesh, gpt
from parallel.nn import Layer, Model, Sequential, dropped, region_of


def moe_gpt(
    *,
    gate: str | Callable[[int], Gate] = "switch",
    gate_options: Mapping[str, Any] | None = None,
    num_experts: int | Sequence[int] = 8,
    every: int = 2,
    num_shared: int = 0,
    expert_dropout: float = 0.0,
    hidden: int = 256,
    num_layers: int = 4,
    mesh: Mesh | None = None,
    log: RoutingLog | None = None,
    rows_per_group: int = 1,
    padding: str = "none",
    num_parts: int = 1,
    payload: str = "same",
    dispatch: str = "flat",
    ranks_per_host: int | None = None,
    **options: Any,
) -> Model:
    """Return a GPT in which every few blocks have experts in place of an MLP.

    Parameters
    ----------
    gate : str or function
        A name of `moe.GATES`, or a function that makes a gate for a number of experts.
    gate_options : mapping, optional
        Options of the gate with this name, such as ``{"capacity_factor": 2.0}``.
    num_experts : int or sequence of int
        The experts of each block that has experts; or a number for each of these blocks, in order:
        PR-MoE has more experts in deeper blocks.
    every : int
        The last of so many consecutive blocks has experts; 1: all blocks.
    num_shared : int
        How many MLPs stand beside the experts and are used by all tokens.
    expert_dropout : float
        The rate of dropout in the middle of each expert (Fedus et al. 2021: in fine-tuning more
        than the `dropout` of the other layers).
    hidden, num_layers : int
        As in `parallel.gpt`, which takes the other `options`.
    mesh : Mesh, optional
        As in `parallel.gpt`.  Ranks along the axis ``expert`` divide the experts.
    log : RoutingLog, optional
        As in `MixtureOfExperts`, and so are `rows_per_group`, `padding`, `num_parts`, `payload`,
        `dispatch` and `ranks_per_host`.

    Raises
    ------
    ValueError
        For a gate or an option that does not exist, or if `num_experts` has another length than
        there are blocks with experts.

    Examples
    --------
    >>> from moe import moe_gpt
    >>> model = moe_gpt(num_layers=2, hidden=16, num_experts=4)
    >>> model.specs["block1.mlp.moe.experts.up.weight"].shape
    (4, 16, 64)
    """
    gates = gates_of_blocks(gate, gate_options or {}, num_experts, every, num_layers)
    common: dict[str, Any] = {
        "mesh": mesh,
        "log": log,
        "rows_per_group": rows_per_group,
        "padding": padding,
        "num_parts": num_parts,
        "payload": payload,
        "dispatch": dispatch,
        "ranks_per_host": ranks_per_host,
    }

    def mlp(i: int, dense: Callable[[], Sequential]) -> dict[str, Layer] | None:
        if i not in gates:
            return None
        drop = dropped(expert_dropout, f"block{i}.expert", mesh, region_of(mesh), 4 * hidden)
        expert = partial(with_dropout, dense, drop)
        routed = MixtureOfExperts(hidden, gates[i], expert, name=f"block{i}", **common)
        shared = {f"shared{n}": dense() for n in range(num_shared)}
        return {"moe": SumOfLayers({"routed": routed, **shared}) if shared else routed}

    return gpt(hidden=hidden, num_layers=num_layers, mesh=mesh, mlp=mlp, **options)


def gates_of_blocks(
    gate: str | Callable[[int], Gate],
    gate_options: Mapping[str, Any],
    num_experts: int | Sequence[int],
    every: int,
    num_layers: int,
) -> dict[int, Gate]:
    """Return the gate of each block that has experts, by its number.

    There are `num_layers` blocks; `gate`, `gate_options`, `num_experts` and `every` are as in
    `moe_gpt`.  Raises ValueError as `moe_gpt` does.
    """
    if every < 1:
        raise ValueError(f"every is {every}: it must be at least 1")
    blocks = [i for i in range(num_layers) if i % every == every - 1]
    numbers = [num_experts] * len(blocks) if isinstance(num_experts, int) else list(num_experts)
    if len(numbers) != len(blocks):
        raise ValueError(
            f"num_experts has {len(numbers)} numbers for {len(blocks)} blocks with experts"
        )
    make_gate = gate_by_name(gate, gate_options) if isinstance(gate, str) else gate
    return {i: make_gate(n) for i, n in zip(blocks, numbers, strict=True)}


def with_dropout(make: Callable[[], Sequential], drop: Mapping[str, Layer]) -> Layer:
    """Return the MLP that `make` makes, with `drop` before its last layer."""
    *first, last = make().layers.items()
    return Sequential({**dict(first), **drop, **dict([last])})


def gate_by_name(name: str, options: Mapping[str, Any]) -> Callable[[int], Gate]:
    """Return what makes the gate of this name with some options.

    Raises ValueError if there is no such gate, or if it does not have these options.
    """
    if name not in GATES:
        raise ValueError(f"there is no gate {name!r}; choose from {', '.join(GATES)}")
    known = [*inspect.signature(GATES[name]).parameters][1:]
    if unknown := [option for option in options if option not in known]:
        raise ValueError(f"the gate {name} has no option {unknown[0]}, only {', '.join(known)}")
    return partial(GATES[name], **options)
