"""Training strategies by name: a `Trainer` with a mesh and a sharding of one kind.

n(unit) are the bytes of a unit, S the number of steps, k that of micro-batches.  The tables give
the bytes that all ranks together send in a call, by ring, in addition to what every training run
sends (`Trainer`), for steps of which no update was skipped.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

from collectives import Communicator
from parallel.accounts.monitor import PhaseFunction
from parallel.mesh import Mesh
from parallel.nn import Model
from parallel.runtime import Recipe, Trainer
from parallel.sharding import CommHook, Sharding, choose_group_size
from parallel.sharding.quantization import BLOCK
from parallel.sharding.sharding import BUCKET_BYTES


class Options(TypedDict, total=False):
    """The keyword arguments of every strategy; see `Trainer`."""

    algorithm: str
    phase: PhaseFunction


def serial(
    comm: Communicator | None,
    model: Model,
    recipe: Recipe | None = None,
    **options: Unpack[Options],
) -> Trainer:
    """Return a training run on one rank: the reference.

    `comm` is not used; `model`, `recipe` and options are as in `ddp`.  Raises ValueError on more
    than one rank: all would do the same.

    Examples
    --------
    >>> from parallel import gpt, serial
    >>> serial(None, gpt(num_layers=1)).size
    1
    """
    if comm is not None and comm.size > 1:
        raise ValueError(f"the serial strategy runs on one rank, not on {comm.size}")
    return Trainer(Mesh(None), model, recipe, **options)


def ddp(
    comm: Communicator,
    model: Model,
    recipe: Recipe | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    hook: CommHook | None = None,
    find_unused_parameters: bool = False,
    broadcast_algorithm: str = "binomial",
    **options: Unpack[Options],
) -> Trainer:
    """Return a data-parallel run: gradients are summed in buckets while backward computes others.

    Li et al. 2020 (PyTorch DistributedDataParallel).  A bucket holds the gradients of layers that
    are adjacent in backward, up to `bucket_bytes`, or those of one larger layer.  With n(b) the
    bytes of bucket b, u units and p ranks,

    | phase             | collective | calls | bytes a call    |
    |-------------------|------------|-------|-----------------|
    | start/broadcast   | broadcast  | u     | (p-1) n(unit)   |
    | backward/bucket b | all_reduce | S     | 2 (p-1) n(b)    |

    That is 2 Psi (p-1)/p elements for each rank and step, for any number of micro-batches: only the
    last one's backward sends.  Each rank's loss is the sum over its own rows divided by the rows of
    the whole batch, and the ranks' gradients are added: this is exact for uneven parts too.
    Initial values are those of rank 0.

    Parameters
    ----------
    comm, model, recipe, options
        As in `Trainer`; the options are `algorithm` and `phase`.
    bucket_bytes : int
        The most bytes of a bucket of several layers, by default 25 MiB.  Raises ValueError if it
        is less than 1.
    hook : CommHook, optional
        How a bucket is summed; by default `AllReduce`.
    find_unused_parameters : bool
        Allow layers that take no part in a step.  The gradient is zero on ranks that did not use a
        layer, and a layer that no rank used is not updated.  This takes an all-reduce of a byte for
        each layer.  Otherwise `Trainer.step` raises MissingGradient.
    broadcast_algorithm : str
        Of the initial values.

    Examples
    --------
    >>> import collectives
    >>> from parallel import ddp, gpt
    >>> make = lambda comm: ddp(comm, gpt(num_layers=1), bucket_bytes=10**6)
    >>> list(collectives.run(lambda comm: make(comm).buckets, size=2)[0])
    ['bucket0', 'bucket1', 'bucket2']
    """
    sharding = Sharding.ddp(
        bucket_bytes=bucket_bytes, hook=hook, find_unused_parameters=find_unused_parameters,
        broadcast_algorithm=broadcast_algorithm,
    )  # fmt: skip
    return Trainer(Mesh(comm), model, recipe, sharding=sharding, **options)


def zero1(
    comm: Communicator, model: Model, recipe: Recipe | None = None, **options: Unpack[Options]
) -> Trainer:
    """Return a run of ZeRO stage 1: each rank keeps its part of the optimizer states.

    Rajbhandari et al. 2020.  Each of p ranks owns one p-th of every unit, its shard; it updates the
    shard and sends it where it is needed.  Initial values must be the same on all ranks.

    | phase        | collective     | calls | bytes a call  |
    |--------------|----------------|-------|---------------|
    | reduce/unit  | reduce_scatter | S     | (p-1) n(unit) |
    | update/unit  | all_gather     | S     | (p-1) n(unit) |

    A rank sends 2 Psi (p-1)/p elements in a step, for any number of micro-batches.

    `comm`, `model`, `recipe` and options are as in `ddp`.

    Examples
    --------
    >>> import collectives
    >>> from parallel import Recipe, gpt, zero1
    >>> make = lambda comm: zero1(comm, gpt(num_layers=1), Recipe("float16", num_micro_batches=2))
    >>> collectives.run(lambda comm: make(comm).memory.peak["optimizer"], size=2)
    [3750912, 3750912]
    """
    return Trainer(Mesh(comm), model, recipe, sharding=Sharding.zero(1), **options)


def zero2(
    comm: Communicator, model: Model, recipe: Recipe | None = None, **options: Unpack[Options]
) -> Trainer:
    """Return a run of ZeRO stage 2: each rank keeps its part of optimizer states and gradients.

    | phase         | collective     | calls | bytes a call  |
    |---------------|----------------|-------|---------------|
    | backward/unit | reduce_scatter | k S   | (p-1) n(unit) |
    | update/unit   | all_gather     | S     | (p-1) n(unit) |

    A rank sends (k + 1) Psi (p-1)/p elements in a step.  The gradient of a whole unit is summed
    while backward computes that of the next, and then freed.

    `comm`, `model`, `recipe` and options are as in `ddp`.

    Examples
    --------
    >>> import collectives
    >>> from parallel import gpt, zero2
    >>> make = lambda comm: zero2(comm, gpt(num_layers=1)).memory.peak["gradients"]
    >>> collectives.run(make, size=2)
    [3750912, 3750912]
    """
    return Trainer(Mesh(comm), model, recipe, sharding=Sharding.zero(2), **options)


def zero3(
    comm: Communicator,
    model: Model,
    recipe: Recipe | None = None,
    *,
    keep_after_forward: bool = False,
    **options: Unpack[Options],
) -> Trainer:
    """Return a run of ZeRO stage 3: each rank keeps its part of all states.

    A layer's parameters are gathered before it runs and freed after it has run.  While a layer
    runs, those of the next one are gathered.

    | phase         | collective     | calls | bytes a call  |
    |---------------|----------------|-------|---------------|
    | forward/unit  | all_gather     | k S   | (p-1) n(unit) |
    | backward/unit | all_gather     | k S   | (p-1) n(unit) |
    | backward/unit | reduce_scatter | k S   | (p-1) n(unit) |

    A rank sends 3 k Psi (p-1)/p elements in a step.  With `keep_after_forward`, parameters are
    freed after backward only, and a rank sends 2 k Psi (p-1)/p.

    `comm`, `model`, `recipe` and options are as in `ddp`.

    Examples
    --------
    >>> import collectives
    >>> from parallel import gpt, zero3
    >>> make = lambda comm: zero3(comm, gpt(num_layers=0, hidden=4, context=2, num_heads=1))
    >>> print(*collectives.run(lambda comm: make(comm).actions[:5], size=2)[0])
    0UNSHARD[embedding]@data 0UNSHARD[head]@data 0F0[embedding] 0RESHARD[embedding] 0F0[head]
    """
    sharding = Sharding.zero(3, keep_after_forward=keep_after_forward)
    return Trainer(Mesh(comm), model, recipe, sharding=sharding, **options)


def hsdp(
    comm: Communicator,
    model: Model,
    recipe: Recipe | None = None,
    *,
    group_size: int | None = None,
    keep_after_forward: bool = False,
    **options: Unpack[Options],
) -> Trainer:
    """Return a run of hybrid sharding: ZeRO-3 in groups of g ranks; G groups sum their gradients.

    A group is usually the ranks of one host, so that parameters are gathered within the host.  Zhao
    et al. 2023 (PyTorch FSDP, hybrid sharding); Zhang et al. 2022 (MiCS).

    | phase          | collective     | calls                | bytes a call      |
    |----------------|----------------|----------------------|-------------------|
    | forward/unit   | all_gather     | k S for each group   | (g-1) n(unit)     |
    | backward/unit  | all_gather     | k S for each group   | (g-1) n(unit)     |
    | backward/unit  | reduce_scatter | k S for each group   | (g-1) n(unit)     |
    | replicate/unit | all_reduce     | S for each shard     | 2 (G-1) n(shard)  |

    In a step a rank sends 3 k Psi (g-1)/g elements within its group and 2 Psi/g (G-1)/G to others.
    With one group this is ZeRO-3; with groups of one rank it is data parallelism.

    The mesh has the axes ``replicate`` and ``shard``.

    `group_size` consecutive ranks form a group; see `choose_group_size` for the default.  Raises
    ValueError if it does not divide the number of ranks.  `keep_after_forward` is as in `zero3`;
    `comm`, `model`, `recipe` and options are as in `ddp`.

    Examples
    --------
    >>> import collectives
    >>> from parallel import gpt, hsdp
    >>> make = lambda comm: hsdp(comm, gpt(num_layers=1), group_size=2)
    >>> collectives.run(lambda comm: make(comm).mesh.axes, size=4)[0]
    {'replicate': 2, 'shard': 2}
    """
    sharding = Sharding.hsdp(keep_after_forward=keep_after_forward)
    return Trainer(mesh_of_groups(comm, group_size), model, recipe, sharding=sharding, **options)


def zeropp(
    comm: Communicator,
    model: Model,
    recipe: Recipe | None = None,
    *,
    group_size: int | None = None,
    block: int = BLOCK,
    gradient_bits: int = 8,
    **options: Unpack[Options],
) -> Trainer:
    """Return a run of ZeRO++: ZeRO-3 on p ranks in G groups of g, which sends quantized values.

    Wang et al. 2023:

    - Forward gathers quantized parameters: int8, with a scale for each block (qwZ).
    - Each rank then keeps a g-th of them, so that backward gathers within the group (hpZ).
    - Gradients are exchanged quantized, within the group and then between groups; after each
      exchange they are added in float32 (qgZ).

    With q(n) the bytes of n quantized elements, Q(unit) those of all shards of a unit, and q' and
    Q' the same with `gradient_bits`,

    | phase                 | collective | calls               | bytes a call                      |
    |-----------------------|------------|---------------------|-----------------------------------|
    | forward/unit          | all_gather | k S                 | (p-1) Q(unit)                     |
    | backward/unit/within  | all_gather | k S for each group  | (g-1) n(unit)                     |
    | backward/unit/within  | all_to_all | k S for each group  | (g-1) Q'(unit)                    |
    | backward/unit/between | all_to_all | k S for each column | (G-1) q'(the column's shards)     |

    Between groups this is about a quarter of what ZeRO-3 sends in two bytes.  What is sent is
    rounded, so losses differ from those of one rank; but all ranks compute with the same
    parameters.  The paper sends gradients in four bits.

    `block` elements share a scale; those of gradients have `gradient_bits`, 8 or 4.  The mesh,
    `group_size`, `comm`, `model`, `recipe` and options are as in `hsdp`.

    Examples
    --------
    >>> import collectives
    >>> from parallel import gpt, zeropp
    >>> make = lambda comm: zeropp(comm, gpt(num_layers=1)).mesh.axes
    >>> collectives.run(make, size=4)[0]
    {'replicate': 2, 'shard': 2}
    """
    sharding = Sharding.zeropp(block=block, gradient_bits=gradient_bits)
    return Trainer(mesh_of_groups(comm, group_size), model, recipe, sharding=sharding, **options)


def local_updates(
    comm: Communicator,
    model: Model,
    recipe: Recipe | None = None,
    *,
    every: int = 10,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    **options: Unpack[Options],
) -> Trainer:
    """Return a run in which ranks update alone and agree on one model every `every` steps.

    Douillard et al. 2023 (DiLoCo).  A rank's gradient is the mean over its own rows; after `every`
    steps, and at the end of `Trainer.train`, all continue from a common model (`OuterMomentum`).

    | phase        | collective | calls           | bytes a call                              |
    |--------------|------------|-----------------|-------------------------------------------|
    | average/unit | all_reduce | ceil(S / every) | 2 (p-1) n(unit), in the dtype of updates  |

    Losses differ from those of one rank.  A checkpoint can be saved when all have the same model.
    `outer_lr` and `outer_momentum` are those of `OuterMomentum`.  `comm`, `model`, `recipe` and
    options are as in `ddp`, without float16 and offloads.

    Examples
    --------
    >>> import collectives
    >>> from parallel import gpt, local_updates
    >>> make = lambda comm: local_updates(comm, gpt(num_layers=1), every=5).sharding.every
    >>> collectives.run(make, size=2)
    [5, 5]
    """
    sharding = Sharding.local_updates(every=every, outer_lr=outer_lr, outer_momentum=outer_momentum)
    return Trainer(Mesh(comm), model, recipe, sharding=sharding, **options)


def mesh_of_groups(comm: Communicator, group_size: int | None = None) -> Mesh:
    """Return a mesh of groups of consecutive ranks; see `choose_group_size`."""
    size = choose_group_size(comm.size, group_size)
    return Mesh(comm, replicate=comm.size // size, shard=size)
