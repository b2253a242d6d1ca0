"""How the ranks along the data axes of a mesh divide a model: a value, not a class for each way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from parallel.sharding.collective import AllGather, AllReduce, CommHook, Gather, ReduceScatter
from parallel.sharding.local import OuterMomentum
from parallel.sharding.quantization import BLOCK
from parallel.sharding.quantized import QuantizedExchange, QuantizedGather
from parallel.sharding.server import BroadcastFromServer, ReduceToServer

BUCKET_BYTES = 25 * 2**20
DIVIDED = (
    frozenset[str](),
    frozenset({"optimizer", "master"}),
    frozenset({"optimizer", "master", "gradients"}),
    frozenset({"optimizer", "master", "gradients", "parameters"}),
)  # by ZeRO stage


@dataclass(frozen=True)
class Sharding:
    """Which categories of memory ranks divide, and how they sum gradients and gather parameters.

    Attributes
    ----------
    divided : frozenset of str
        The categories of memory of which a rank keeps its part alone: a set of `DIVIDED`.
    reduction : CommHook
        Sums the gradients of a bucket.
    gather : Gather
        Gathers the parameters of a unit.
    shard_axes : tuple of str
        The axes of the mesh along which ranks divide; without any, nothing is summed or gathered.
    replica_axes : tuple of str
        The axes along which ranks keep the same parts, whose gradients are summed once a step.
    secondary_axes : tuple of str
        The axes along which ranks divide the gathered parameters that they keep for backward; none:
        they keep no such part.
    keep_after_forward : bool
        Whether gathered parameters are kept from forward to backward.
    bucket_bytes : int, optional
        The most bytes of gradients of several layers that are summed together, during the last
        backward; None: those of one layer at a time.
    find_unused_parameters : bool
        Whether layers may take no part in a step.
    broadcast_algorithm : str, optional
        How the initial values of rank 0 are sent; None: ranks have the same and send none.
    server : int, optional
        The rank that has all of what is divided.
    every : int, optional
        Ranks update by their own gradients, and `reduction` works on parameters, once in so many
        steps; None: they sum the gradients of every step.

    Examples
    --------
    >>> from parallel import Sharding
    >>> Sharding.zero(3).divided == Sharding.hsdp().divided
    True
    """

    divided: frozenset[str] = DIVIDED[0]
    reduction: CommHook = field(default_factory=AllReduce)
    gather: Gather = field(default_factory=AllGather)
    shard_axes: tuple[str, ...] = ()
    replica_axes: tuple[str, ...] = ()
    secondary_axes: tuple[str, ...] = ()
    keep_after_forward: bool = False
    bucket_bytes: int | None = None
    find_unused_parameters: bool = False
    broadcast_algorithm: str | None = None
    server: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}: it must be at least 1")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every is {self.every}: it must be at least 1 step")
        if self.keep_after_forward and self.secondary_axes:
            raise ValueError("ZeRO++ keeps a part of the parameters: it has no keep_after_forward")

    # Named values

    @classmethod
    def ddp(
        cls,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        hook: CommHook | None = None,
        find_unused_parameters: bool = False,
        broadcast_algorithm: str = "binomial",
    ) -> Sharding:
        """Return that of data parallelism.

        `bucket_bytes`, `hook`, `find_unused_parameters` and `broadcast_algorithm` are those of
        `parallel.ddp`.
        """
        return cls(
            reduction=AllReduce() if hook is None else hook, shard_axes=("data",),
            bucket_bytes=bucket_bytes, find_unused_parameters=find_unused_parameters,
            broadcast_algorithm=broadcast_algorithm,
        )  # fmt: skip

    @classmethod
    def zero(cls, stage: int, *, keep_after_forward: bool = False) -> Sharding:
        """Return that of ZeRO, stage 1 to 3; see `parallel.zero1`.

        `keep_after_forward` is for stage 3.  Raises ValueError for another stage.
        """
        if stage not in (1, 2, 3):
            raise ValueError(f"ZeRO has the stages 1, 2 and 3, not {stage}")
        if keep_after_forward and stage < 3:
            raise ValueError(f"ZeRO-{stage} gathers no parameters: it has no keep_after_forward")
        return cls(
            DIVIDED[stage], ReduceScatter(), shard_axes=("data",),
            keep_after_forward=keep_after_forward,
        )  # fmt: skip

    @classmethod
    def hsdp(cls, *, keep_after_forward: bool = False) -> Sharding:
        """Return that of hybrid sharding; see `parallel.hsdp` for `keep_after_forward`."""
        both = cls.zero(3, keep_after_forward=keep_after_forward)
        return replace(both, shard_axes=("shard",), replica_axes=("replicate",))

    @classmethod
    def zeropp(cls, *, block: int = BLOCK, gradient_bits: int = 8) -> Sharding:
        """Return that of ZeRO++; `block` and `gradient_bits` are those of `parallel.zeropp`."""
        return cls(
            DIVIDED[3], QuantizedExchange(block, "shard", "replicate", gradient_bits),
            QuantizedGather(block), shard_axes=("replicate", "shard"), secondary_axes=("shard",),
        )  # fmt: skip

    @classmethod
    def local_updates(
        cls, *, every: int, outer_lr: float = 0.7, outer_momentum: float = 0.9
    ) -> Sharding:
        """Return that of local updates.

        See `parallel.local_updates` for `every`, `outer_lr` and `outer_momentum`.
        """
        outer = OuterMomentum(outer_lr, outer_momentum)
        return cls(reduction=outer, shard_axes=("data",), every=every)

    @classmethod
    def parameter_server(cls, server: int = 0) -> Sharding:
        """Return that of a synchronous parameter server, on rank `server`."""
        return cls(
            DIVIDED[1], ReduceToServer(), BroadcastFromServer(), shard_axes=("data",),
            broadcast_algorithm="linear", server=server,
        )  # fmt: skip

    # What follows

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes along which ranks compute different rows, slowest first."""
        return self.replica_axes + self.shard_axes

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """All groups of axes along which ranks communicate, in an order that all ranks know."""
        used = (self.axes, self.shard_axes, self.replica_axes, self.secondary_axes)
        each = ((axis,) for axis in self.axes)
        return [axes for axes in dict.fromkeys((*used, *each)) if axes]

    def reduces_in_backward(self, *, is_last: bool) -> bool:
        """Return whether gradients are summed during a backward pass.

        `is_last`: whether it is that of the last micro-batch.
        """
        if not self.shard_axes:
            return False
        return "gradients" in self.divided or (self.bucket_bytes is not None and is_last)

    @property
    def reduces_after_backward(self) -> bool:
        """Whether gradients are summed after all micro-batches."""
        is_in_backward = "gradients" in self.divided or self.bucket_bytes is not None
        return bool(self.shard_axes) and not is_in_backward and self.every is None

    def algorithm_sizes(self, sizes: dict[str, int]) -> dict[str, list[int]]:
        """Return the collectives called by name, and by groups of how many ranks.

        `sizes`: the number of ranks along each axis.
        """

        def along(axes: tuple[str, ...]) -> int:
            return math.prod(sizes[axis] for axis in axes)

        found: dict[str, list[int]] = {}
        if not self.shard_axes:
            return found
        for collective in self.reduction.collectives:
            found.setdefault(collective, []).append(along(self.shard_axes))
        if "optimizer" in self.divided:
            for collective in self.gather.collectives:
                found.setdefault(collective, []).append(along(self.shard_axes))
        if self.secondary_axes:
            found.setdefault("all_gather", []).append(along(self.secondary_axes))
        if self.replica_axes:
            found.setdefault("all_reduce", []).append(along(self.replica_axes))
        return found

    def config(self) -> dict[str, Any]:
        """Return what must be equal on all ranks."""
        return {
            "divided": sorted(self.divided),
            "axes": [self.shard_axes, self.replica_axes, self.secondary_axes],
            "keep_after_forward": self.keep_after_forward,
            "bucket_bytes": self.bucket_bytes,
            "find_unused_parameters": self.find_unused_parameters,
            "broadcast_algorithm": self.broadcast_algorithm,
            "server": self.server,
            "every": self.every,
        }


def choose_group_size(num_ranks: int, wanted: int | None = None) -> int:
    """Return how many consecutive ranks form a group.

    This is `wanted`, or by default the largest proper divisor of `num_ranks` above 1; `num_ranks`
    if there is none.  Raises ValueError if `wanted` does not divide `num_ranks`.
    """
    if wanted is None:
        divisors = [n for n in range(2, num_ranks) if num_ranks % n == 0]
        return divisors[-1] if divisors else num_ranks
    if wanted < 1 or num_ranks % wanted:
        raise ValueError(f"{num_ranks} ranks cannot be divided into groups of {wanted}")
    return wanted
