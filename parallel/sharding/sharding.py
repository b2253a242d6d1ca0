"""How the ranks along the data axes of a mesh divide a model: a value, not a class for each way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from parallel.nn import Model
from parallel.sharding.collective import AllGather, AllReduce, CommHook, Gather, ReduceScatter
from parallel.sharding.hooks import OuterMomentum
from parallel.sharding.quantization import BLOCK, QuantizedExchange, QuantizedGather
from parallel.sharding.server import BroadcastFromServer, ReduceToServer

DIVIDED = (
    frozenset[str](),
    frozenset({"optimizer", "master"}),
    frozenset({"optimizer", "master", "gradients"}),
    frozenset({"optimizer", "master", "gradients", "parameters"}),
)  # by ZeRO stage


@dataclass(frozen=True)
class Sharding:
    """Which categories of memory ranks divide, and how they sum gradients and gather parameters.

    The tables of `ddp` and the other named values give the bytes that all ranks together send in a
    call, by ring, in addition to what every training run sends (`Trainer`), if no update is
    skipped.

    Attributes
    ----------
    divided : frozenset of str
        The categories of memory of which a rank keeps its part alone: a set of `DIVIDED`.
    reduction, gather : CommHook
        The hooks that sum the gradients of a bucket, and gather the parameters of a unit.
    shard_axes, replica_axes : tuple of str
        The axes of the mesh along which ranks divide (without any, nothing is summed or gathered),
        and along which they keep the same parts, whose gradients are summed once a step.  A unit
        that ranks along ``"expert"`` divide by its placement has the other axes only (`of_unit`).
    secondary_axes : tuple of str
        The axes along which ranks divide the gathered parameters that they keep for backward, if
        any.
    keep_after_forward : bool
        Whether gathered parameters are kept from forward to backward.
    bucket_bytes : int, optional
        The most bytes of gradients of several layers that are summed together, during the last
        backward; None: the parameters of one layer at a time.
    find_unused_parameters : bool
        Whether layers may take no part in a step; else `Trainer.step` raises MissingGradient.  The
        gradient is zero on ranks that did not use a layer, and a layer that no rank used is not
        updated.  This takes an all-reduce of a byte for each layer.
    broadcast_algorithm : str, optional
        How the initial values of rank 0 are sent; None: ranks have the same and send none.
    server : int, optional
        The rank that has all of each unit in the `divided` categories.
    every : int, optional
        Ranks update by their own gradients, and `reduction` works on parameters, once in `every`
        steps; None: ranks sum the gradients of every step.

    Examples
    --------
    >>> import collectives
    >>> from parallel import Mesh, Sharding, Trainer, gpt
    >>> def gradients(comm):
    ...     run = Trainer(Mesh(comm), gpt(num_layers=1), sharding=Sharding.zero(2))
    ...     return run.memory.peak["gradients"]
    >>> collectives.run(gradients, size=2)
    [3750912, 3750912]
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
        bucket_bytes: int = 25 * 2**20,
        hook: CommHook | None = None,
        find_unused_parameters: bool = False,
        broadcast_algorithm: str = "binomial",
        axes: tuple[str, ...] = ("data",),
    ) -> Sharding:
        """Return data parallelism: ranks divide batches, and each keeps the whole model.

        Li et al. 2020 (PyTorch DistributedDataParallel).  `hook`, by default `AllReduce`, sums a
        bucket of layers that are adjacent in backward while backward computes others.  With n(b)
        the bytes of bucket b, u units and p ranks,

        | phase             | collective | calls | bytes a call    |
        |-------------------|------------|-------|-----------------|
        | start/broadcast   | broadcast  | u     | (p-1) n(unit)   |
        | backward/bucket b | all_reduce | S     | 2 (p-1) n(b)    |

        That is 2 Psi (p-1)/p elements for each rank and step, for any number of micro-batches.  A
        layer larger than `bucket_bytes` (at least 1, or ValueError) is a bucket alone.
        `find_unused_parameters` and `broadcast_algorithm` are the attributes.  `axes` are the
        axes along which ranks compute different tokens; ``"context"`` may be one.
        """
        return cls(
            reduction=AllReduce() if hook is None else hook,
            shard_axes=axes,
            bucket_bytes=bucket_bytes,
            find_unused_parameters=find_unused_parameters,
            broadcast_algorithm=broadcast_algorithm,
        )

    @classmethod
    def zero(
        cls, stage: int, *, keep_after_forward: bool = False, axes: tuple[str, ...] = ("data",)
    ) -> Sharding:
        """Return the sharding of ZeRO: ranks divide optimizer states, gradients and parameters too.

        Rajbhandari et al. 2020.  Each of p ranks updates one p-th of every unit.  From `stage` 2
        on, gradients are divided: the gradients of a unit are summed while backward computes the
        next unit.  In stage 3, parameters are divided: the parameters of a layer are gathered while
        the layer before it runs, and freed after it has run; or, with `keep_after_forward`, after
        backward only.

        | stage | phase         | collective     | calls | bytes a call  |
        |-------|---------------|----------------|-------|---------------|
        | 1     | reduce/unit   | reduce_scatter | S     | (p-1) n(unit) |
        | 2, 3  | backward/unit | reduce_scatter | k S   | (p-1) n(unit) |
        | 1, 2  | update/unit   | all_gather     | S     | (p-1) n(unit) |
        | 3     | forward/unit  | all_gather     | k S   | (p-1) n(unit) |
        | 3     | backward/unit | all_gather     | k S   | (p-1) n(unit) |

        A rank sends 2, k + 1 or 3 k times Psi (p-1)/p elements in a step, and 2 k times with
        `keep_after_forward`, which is for stage 3.  `axes` are as in `ddp`.  Raises ValueError for
        other stages.
        """
        if stage not in (1, 2, 3):
            raise ValueError(f"ZeRO has the stages 1, 2 and 3, not {stage}")
        if keep_after_forward and stage < 3:
            raise ValueError(f"ZeRO-{stage} gathers no parameters: it has no keep_after_forward")
        return cls(
            DIVIDED[stage], ReduceScatter(), shard_axes=axes, keep_after_forward=keep_after_forward
        )

    @classmethod
    def hsdp(cls, *, keep_after_forward: bool = False) -> Sharding:
        """Return hybrid sharding: ZeRO-3 in groups of g ranks; the G groups sum gradients.

        A group is usually the ranks of one host, so that parameters are gathered within it: the
        mesh has the axes ``replicate``, of size G, and ``shard``, of size g (`choose_group_size`).
        Zhao et al. 2023 (PyTorch FSDP, hybrid sharding); Zhang et al. 2022 (MiCS).

        | phase          | collective     | calls                | bytes a call      |
        |----------------|----------------|----------------------|-------------------|
        | forward/unit   | all_gather     | k S for each group   | (g-1) n(unit)     |
        | backward/unit  | all_gather     | k S for each group   | (g-1) n(unit)     |
        | backward/unit  | reduce_scatter | k S for each group   | (g-1) n(unit)     |
        | replicate/unit | all_reduce     | S for each shard     | 2 (G-1) n(shard)  |

        In a step a rank sends 3 k Psi (g-1)/g elements within its group and 2 Psi/g (G-1)/G to
        others.  With one group this is ZeRO-3; with groups of one rank it is data parallelism.
        `keep_after_forward` is as in `zero`.

        Examples
        --------
        >>> import collectives
        >>> from parallel import Mesh, Sharding, Trainer, gpt
        >>> def batch_part(comm):
        ...     mesh = Mesh(comm, replicate=2, shard=2)
        ...     return Trainer(mesh, gpt(num_layers=1), sharding=Sharding.hsdp()).batch_part
        >>> collectives.run(batch_part, size=4)
        [(0, 4), (1, 4), (2, 4), (3, 4)]
        """
        both = cls.zero(3, keep_after_forward=keep_after_forward)
        return replace(both, shard_axes=("shard",), replica_axes=("replicate",))

    @classmethod
    def zeropp(cls, *, block: int = BLOCK, gradient_bits: int = 8) -> Sharding:
        """Return ZeRO++: ZeRO-3 on p ranks in G groups of g, which sends quantized values.

        Wang et al. 2023, on the mesh of `hsdp`.  Forward gathers parameters in int8, with a scale
        for each block of `block` elements (qwZ).  Each rank then keeps a g-th of them, so that
        backward gathers within the group (hpZ).  Gradients are exchanged in `gradient_bits`, 8 or
        4, within the group and then between groups; after each exchange they are added in float32
        (qgZ).  With q(n) the bytes of n quantized elements, Q(unit) the bytes of all quantized
        shards of a unit, and q' and Q' the same with `gradient_bits`,

        | phase                 | collective | calls               | bytes a call               |
        |-----------------------|------------|---------------------|----------------------------|
        | forward/unit          | all_gather | k S                 | (p-1) Q(unit)              |
        | backward/unit/within  | all_gather | k S for each group  | (g-1) n(unit)              |
        | backward/unit/within  | all_to_all | k S for each group  | (g-1) Q'(unit)             |
        | backward/unit/between | all_to_all | k S for each column | (G-1) q'(shards in column) |

        Between groups this is about a quarter of what ZeRO-3 sends in two bytes.  What is sent is
        rounded, so losses differ from the losses of one rank; but all ranks compute with the same
        parameters.  The paper sends gradients in four bits.
        """
        return cls(
            DIVIDED[3],
            QuantizedExchange(block, "shard", "replicate", gradient_bits),
            QuantizedGather(block),
            shard_axes=("replicate", "shard"),
            secondary_axes=("shard",),
        )

    @classmethod
    def local_updates(
        cls, *, every: int = 10, outer_lr: float = 0.7, outer_momentum: float = 0.9
    ) -> Sharding:
        """Return the sharding of ranks that update alone, and average every `every` steps.

        Douillard et al. 2023 (DiLoCo).  A rank's gradient is the mean over its own rows; after
        `every` steps, and at the end of `Trainer.train`, all continue from a common model.

        | phase        | collective | calls           | bytes a call                            |
        |--------------|------------|-----------------|-----------------------------------------|
        | average/unit | all_reduce | ceil(S / every) | 2 (p-1) n(unit), in the updates' dtype  |

        Losses differ from the losses of one rank.  A checkpoint can be saved when all have the same
        model.  There is no float16 and no offload.  `OuterMomentum` has `outer_lr` and
        `outer_momentum`.
        """
        outer = OuterMomentum(outer_lr, outer_momentum)
        return cls(reduction=outer, shard_axes=("data",), every=every)

    @classmethod
    def parameter_server(cls, server: int = 0) -> Sharding:
        """Return the sharding of a synchronous parameter server on rank `server`."""
        return cls(
            DIVIDED[1],
            ReduceToServer(),
            BroadcastFromServer(),
            shard_axes=("data",),
            broadcast_algorithm="linear",
            server=server,
        )

    # What follows

    def of_unit(self, model: Model, unit: str) -> Sharding:
        """Return the sharding of a `unit` of a `model`: without the axes that divide the unit.

        Along these axes, a rank's gradient of its part is complete, because the rank computes with
        its part for the tokens of all ranks.  If no axis is left, the rank has the unit alone: the
        unit is not summed, divided or gathered.
        """
        splits = model.split_axes_of(unit)
        if not {*splits} & {*self.axes}:
            return self
        shard, replica = (
            tuple(axis for axis in axes if axis not in splits)
            for axes in (self.shard_axes, self.replica_axes)
        )
        divided = self.divided if shard else DIVIDED[0]
        return replace(self, divided=divided, shard_axes=shard, replica_axes=replica)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes along which ranks compute different tokens, slowest first."""
        return self.replica_axes + self.shard_axes

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The `axes` along which ranks compute different rows, and not parts of the same rows."""
        return tuple(axis for axis in self.axes if axis != "context")

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """All groups of axes along which ranks communicate, in an order that all ranks know."""
        used = (self.axes, self.shard_axes, self.replica_axes, self.secondary_axes)
        alone = ((axis,) for axis in self.axes)
        return [axes for axes in dict.fromkeys((*used, *alone)) if axes]

    @property
    def reduces_in_backward(self) -> bool:
        """Whether gradients are summed while backward runs, of each micro-batch or of the last."""
        is_bucketed = self.bucket_bytes is not None
        return bool(self.shard_axes) and ("gradients" in self.divided or is_bucketed)

    @property
    def reduces_after_backward(self) -> bool:
        """Whether gradients are summed after all micro-batches."""
        is_later = not self.reduces_in_backward and self.every is None
        return bool(self.shard_axes) and is_later

    def algorithm_sizes(self, sizes: dict[str, int]) -> dict[str, list[int]]:
        """Return the numbers of ranks of each collective, by name; `sizes` are by axis."""
        gathered = self.gather.collectives if "optimizer" in self.divided else ()
        calls = [(name, self.shard_axes) for name in (*self.reduction.collectives, *gathered)]
        calls += [("all_gather", self.secondary_axes), ("all_reduce", self.replica_axes)]
        divisors: dict[str, list[int]] = {}
        for collective, axes in calls:
            if axes:
                divisors.setdefault(collective, []).append(math.prod(sizes[axis] for axis in axes))
        return divisors

    def config(self) -> dict[str, Any]:
        """Return what must be equal on all ranks."""
        axes = [self.shard_axes, self.replica_axes, self.secondary_axes]
        options = {name: x for name, x in vars(self).items() if isinstance(x, str | int | None)}
        return {"divided": sorted(self.divided), "axes": axes, **options}


def choose_group_size(num_ranks: int, wanted: int | None = None) -> int:
    """Return how many consecutive ranks form a group.

    This is `wanted`, which must divide `num_ranks` (else ValueError); by default the largest proper
    divisor of `num_ranks` above 1, or `num_ranks` if there is none.
    """
    if wanted is None:
        divisors = [n for n in range(2, num_ranks) if num_ranks % n == 0]
        return divisors[-1] if divisors else num_ranks
    if wanted < 1 or num_ranks % wanted:
        raise ValueError(f"{num_ranks} ranks cannot be divided into groups of {wanted}")
    return wanted
