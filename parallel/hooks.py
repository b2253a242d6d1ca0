"""Gradients summed with fewer bytes than they have: communication hooks for `DataParallel`.

For a bucket of n float32 elements on p ranks, of which rank d owns n(d), all-reduces by ring:

| hook            | calls of a bucket      | bytes sent by all ranks     | of an all-reduce's      |
|-----------------|------------------------|-----------------------------|-------------------------|
| `AllReduce`     | all_reduce             | 8 (p-1) n                   | all                     |
| `Compressed`    | all_reduce             | 4 (p-1) n                   | 1/2                     |
| `Int8Blocks`    | all_to_all, all_gather | 2 (p-1) sum over d of       | 1/4 + 1/256             |
|                 |                        | n(d) + 4 ceil(n(d) / 256)   |                         |
| `PowerSGD`      | all_reduce, up to 3    | 8 (p-1) r (rows + columns)  | r (rows + columns)      |
|                 |                        | of each matrix              | / (rows x columns)      |

All ranks end with the same bits.  An inf or a NaN on one rank leaves inf or NaN on all.  What a
hook keeps from step to step is counted with the buffers; what it sends and receives while a bucket
is under way is not.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from collectives import Work
from parallel import shards
from parallel.data import DataParallel, Finish, Hook
from parallel.nn import Array, Spec, narrow, split_flat
from parallel.precision import dtype_of, master_dtype
from parallel.quantise import BLOCK, dequantise, num_blocks, quantise, quantised_bytes
from parallel.traffic import PredictedCall

TWO_BYTES = ("float16", "bfloat16")
EXCHANGE, GATHER = "linear", "ring"  # algorithms of the all-to-all and the all-gather
DEPENDENT = 1e-12  # how much of a column the others do not make up, if it is only rounding

silently = np.errstate(over="ignore", invalid="ignore")  # the result shows an overflow


class Steps(Hook):
    """A hook in one piece: a generator that yields what it has begun and must wait for.

    Backward, or another bucket, goes on meanwhile.
    """

    @abstractmethod
    def run(self, strategy: DataParallel, bucket: str, flat: Array) -> Iterator[Work[Any]]:
        """Replace `flat` by the sum over all ranks, by the same calls in the same order on each."""

    def start(self, strategy: DataParallel, bucket: str, flat: Array) -> Finish:
        return going_on(self.run(strategy, bucket, flat))


def going_on(run: Iterator[Work[Any]]) -> Finish:
    """Let `run` begin its next call; what waits for that and goes on."""
    work = next(run, None)

    def finish() -> Finish | None:
        if work is None:
            return None
        work.wait()
        return going_on(run)

    return finish


class Compressed(Steps):
    """The sum of gradients rounded to float16 or bfloat16.

    One all_reduce of 2 n bytes for a bucket of n elements, whatever the model computes in.  What is
    beyond float16's range, 65504, is inf from then on, and what is below 3e-8 is 0; bfloat16 has
    float32's range and 8 bits of precision for float16's 11.  ValueError for other dtypes.
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in TWO_BYTES:
            raise ValueError(f"gradients are compressed to {' or '.join(TWO_BYTES)}, not {dtype!r}")
        self.dtype = dtype_of(dtype)

    def run(self, strategy: DataParallel, bucket: str, flat: Array) -> Iterator[Work[Any]]:
        short = rounded(flat, self.dtype)
        yield all_reduce(strategy, short)
        if short is not flat:
            put(flat, short)

    def traffic(self, strategy: DataParallel, bucket: str) -> list[PredictedCall]:
        nbytes = self.dtype.itemsize * num_elements(strategy, bucket)
        return [predicted_sum(strategy, bucket, nbytes)]


class Int8Blocks(Steps):
    """The sum of gradients in eight bits, with a scale for every `block` elements.

    Rank d owns a part of n(d) elements of a bucket.  The others send it theirs, quantised; it adds
    them up in float32 and sends the quantised sum to all.  So an element is rounded twice, however
    many ranks there are: on its way to the owner, by at most half a scale for each of the p - 1
    others, and on its way back.

    | collective | calls | bytes, all ranks                                        |
    |------------|-------|---------------------------------------------------------|
    | all_to_all | 1     | (p-1) sum over d of q(d) = n(d) + 4 ceil(n(d) / block)  |
    | all_gather | 1     | (p-1) sum over d of q(d)                                |
    """

    def __init__(self, block: int = BLOCK) -> None:
        num_blocks(0, block)
        self.block = block

    def run(self, strategy: DataParallel, bucket: str, flat: Array) -> Iterator[Work[Any]]:
        comm, xp, me = strategy.comm, array_namespace(flat), strategy.comm.rank
        parts = [shards.span(flat.shape[0], comm.size, rank) for rank in range(comm.size)]
        sizes = self.part_bytes(strategy, bucket)
        table = [[n * (d != s) for d, n in enumerate(sizes)] for s in range(comm.size)]

        given = [quantise(flat[parts[d]], self.block) for d in range(comm.size) if d != me]
        sent = xp.concat([xp.empty(0, dtype=np.uint8), *given])
        theirs = xp.empty((comm.size - 1, sizes[me]), dtype=np.uint8)
        yield comm.all_to_all(
            sent, out=theirs.reshape(-1), counts=table, algorithm=EXCHANGE, async_op=True
        )
        mine = quantise(self._sum(flat[parts[me]], theirs), self.block)
        whole = xp.empty(sum(sizes), dtype=np.uint8)
        yield comm.all_gather(mine, out=whole, counts=sizes, algorithm=GATHER, async_op=True)
        for part, packed in zip(parts, shards.split(whole, sizes), strict=True):
            put(flat[part], dequantise(packed, shards.length(part), self.block))

    @silently
    def _sum(self, own: Array, others: Array) -> Array:
        """Of a part, which came quantised from the others: float32."""
        total = own.astype(np.float32)
        for packed in others:
            total += dequantise(packed, own.shape[0], self.block)
        return total

    def part_bytes(self, strategy: DataParallel, bucket: str) -> list[int]:
        """Of each rank's part, quantised."""
        counts = shards.counts(num_elements(strategy, bucket), strategy.comm.size)
        return [quantised_bytes(n, self.block) for n in counts]

    def traffic(self, strategy: DataParallel, bucket: str) -> list[PredictedCall]:
        nbytes, phase = sum(self.part_bytes(strategy, bucket)), strategy.phase_of(bucket)
        return [
            PredictedCall(phase, "all_to_all", EXCHANGE, nbytes),
            PredictedCall(phase, "all_gather", GATHER, nbytes),
        ]


class Matrix(NamedTuple):
    """A parameter of which a low-rank approximation is sent, and where its gradient lies."""

    part: slice
    rows: int
    columns: int


class PowerSGD(Steps):
    """The sum S of gradients, each matrix of it approximated by P Q' of low rank.

    A step of the power method, which goes on from the last step's Q: P = S Q, made orthonormal, and
    Q = S'P.  Both are linear in S, so they are sums over the ranks.  What the approximation leaves
    out of a rank's own gradient is added to its next one (`error_feedback`).  Vogels et al. 2019.

    Vectors (biases, norms), and matrices for which it saves nothing, are summed as they are.  With
    w bytes an element in the model and W in updates (4 where w is 2), a bucket takes at most

    | collective | calls | bytes of the call                       | what                 |
    |------------|-------|-----------------------------------------|----------------------|
    | all_reduce | 1     | W r (sum of the matrices' rows)         | P                    |
    | all_reduce | 1     | w (number of elements in no matrix)     | the other parameters |
    | all_reduce | 1     | W r (sum of the matrices' columns)      | Q                    |

    A rank keeps W columns (r + rows) bytes for each matrix: Q, and what was left out of its
    gradient.  This is kept without loss scale, and a gradient that overflowed does not change it;
    but what was sent and is then not used, because another overflowed or no rank used the layer,
    is lost.

    `seed`: of the first Q, the same on all ranks.  From the same sums all compute the same, so
    their processors must round alike.  ValueError if a hook is given to a second strategy.
    """

    def __init__(self, rank: int, *, error_feedback: bool = True, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"a matrix is approximated with rank 1 or more, not {rank}")
        self.rank, self.error_feedback, self.seed = rank, error_feedback, seed
        self.bases: dict[str, Array] = {}  # Q of each matrix: (columns, rank), of any length
        self.errors: dict[str, Array] = {}  # what was left out: (rows, columns)

    # What is kept

    def allocate(self, strategy: DataParallel) -> None:
        if self.bases:
            raise ValueError("a PowerSGD keeps what one strategy has left over; make one for each")
        dtype = master_dtype(strategy.dtype)
        for name, matrix in self.all_matrices(strategy):
            first = Spec((matrix.columns, self.rank), spread=1.0).draw(self.seed, f"basis.{name}")
            basis = strategy.new("buffers", first.size, dtype).reshape(first.shape)
            basis[...] = strategy.xp.asarray(first)
            self.bases[name] = basis
            if self.error_feedback:
                error = strategy.new("buffers", matrix.rows * matrix.columns, dtype)
                self.errors[name] = error.reshape(matrix.rows, matrix.columns)

    def state_bytes(self, strategy: DataParallel) -> int:
        each = (
            m.columns * (self.rank + m.rows * self.error_feedback)
            for _, m in self.all_matrices(strategy)
        )
        return sum(each) * master_dtype(strategy.dtype).itemsize

    def all_matrices(self, strategy: DataParallel) -> Iterator[tuple[str, Matrix]]:
        """Of all buckets."""
        for bucket in strategy.buckets:
            yield from self.divided(strategy, bucket)[0].items()

    def divided(self, strategy: DataParallel, bucket: str) -> tuple[dict[str, Matrix], list[slice]]:
        """The matrices of a bucket that are approximated, and where the other parameters lie."""
        matrices: dict[str, Matrix] = {}
        others: list[slice] = []
        stop = 0
        for unit in strategy.buckets[bucket]:
            for key, spec in strategy.model.units[unit].items():
                start, stop = stop, stop + math.prod(spec.shape)
                rows, columns = spec.shape[0], math.prod(spec.shape[1:])
                if self.saves(strategy, rows, columns):
                    matrices[f"{unit}.{key}"] = Matrix(slice(start, stop), rows, columns)
                else:
                    others.append(slice(start, stop))
        return matrices, others

    def saves(self, strategy: DataParallel, rows: int, columns: int) -> bool:
        """Whether P and Q of a matrix are fewer bytes than the matrix."""
        factors = self.rank * (rows + columns) * master_dtype(strategy.dtype).itemsize
        return bool(factors < rows * columns * strategy.dtype.itemsize)

    # A step

    def run(self, strategy: DataParallel, bucket: str, flat: Array) -> Iterator[Work[Any]]:
        matrices, others = self.divided(strategy, bucket)
        if not matrices:
            yield all_reduce(strategy, flat)
            return
        xp, scale = array_namespace(flat), strategy.loss_scale.value
        gradients = {name: flat[m.part].reshape(m.rows, m.columns) for name, m in matrices.items()}
        left, lefts = self._factors(strategy, {name: m.rows for name, m in matrices.items()})
        right, rights = self._factors(strategy, {name: m.columns for name, m in matrices.items()})
        rest = xp.concat([flat[:0], *(flat[part] for part in others)])

        for name, gradient in gradients.items():
            self._begin(name, gradient, scale, lefts[name])
        yield from [all_reduce(strategy, x) for x in (left, rest) if x.shape[0]]
        for name, gradient in gradients.items():
            self._project(name, gradient, scale, lefts[name], rights[name])
        yield all_reduce(strategy, right)
        for name, gradient in gradients.items():
            self._end(name, gradient, lefts[name], rights[name])
        for part, piece in zip(
            others, shards.split(rest, list(map(shards.length, others))), strict=True
        ):
            flat[part] = piece

    def _factors(self, strategy: DataParallel, lengths: dict[str, int]) -> tuple[Array, Any]:
        """One array to send, and the views of it (length, rank) of each matrix."""
        specs = {name: Spec((length, self.rank)) for name, length in lengths.items()}
        size = self.rank * sum(lengths.values())
        flat = strategy.xp.empty(size, dtype=master_dtype(strategy.dtype))
        return flat, split_flat(flat, specs)

    def _whole(self, name: str, gradient: Array, scale: float) -> Array:
        """This rank's gradient, in the loss's scale, with what it has lost so far."""
        whole = gradient.astype(self.bases[name].dtype)
        if self.error_feedback:
            whole += scale * self.errors[name]
        return whole

    @silently
    def _begin(self, name: str, gradient: Array, scale: float, left: Array) -> None:
        """P of this rank."""
        whole = self._whole(name, gradient, scale)
        left[...] = whole @ self.bases[name]
        left += 0 * array_namespace(whole).sum(whole)  # NaN, also if Q has a 0 where an inf is

    @silently
    def _project(self, name: str, gradient: Array, scale: float, left: Array, right: Array) -> None:
        """From the sum of all P (`left`, made orthonormal), Q of this rank, and what that loses."""
        xp, whole = array_namespace(gradient), self._whole(name, gradient, scale)
        is_finite = xp.all(xp.isfinite(left))
        left[...] = orthonormal(left)
        right[...] = whole.T @ left
        if self.error_feedback:
            error = self.errors[name]
            whole -= left @ right.T
            error[...] = xp.where(is_finite, whole / scale, error)

    @silently
    def _end(self, name: str, gradient: Array, left: Array, right: Array) -> None:
        """From P and the sum of all Q, the sum of all gradients, and where to begin the next time.

        A direction in which there was nothing to send is kept: there may be something later.
        """
        xp, basis = array_namespace(gradient), self.bases[name]
        put(gradient, left @ right.T)
        lengths = xp.sqrt(xp.sum(right.astype(np.float64) ** 2, axis=0))
        is_good = xp.isfinite(lengths) & (lengths > 0)
        basis[...] = xp.where(is_good, right / xp.where(is_good, lengths, 1.0), basis)

    def traffic(self, strategy: DataParallel, bucket: str) -> list[PredictedCall]:
        matrices, others = self.divided(strategy, bucket)
        each = self.rank * master_dtype(strategy.dtype).itemsize
        sizes = [
            each * sum(m.rows for m in matrices.values()),
            strategy.dtype.itemsize * sum(map(shards.length, others)),
            each * sum(m.columns for m in matrices.values()),
        ]
        return [predicted_sum(strategy, bucket, nbytes) for nbytes in sizes if nbytes]


@silently
def orthonormal(x: Array) -> Array:
    """The columns of x (rows, columns) made orthonormal from left to right; float64.

    Gram and Schmidt's method, in which each is made orthogonal to the former ones twice (Giraud et
    al. 2005).  One that the former ones make up becomes zero; NaN stays NaN.
    """
    xp = array_namespace(x)
    done = x.T.astype(np.float64, order="C")
    for k, column in enumerate(done):
        before = xp.sqrt(column @ column)
        for _ in range(2 if k else 0):
            column -= (done[:k] @ column) @ done[:k]
        rest = xp.sqrt(column @ column)
        is_new = rest > DEPENDENT * before
        column *= is_new / xp.where(is_new, rest, 1.0)
    return done.T


def all_reduce(strategy: DataParallel, x: Array) -> Work[Any]:
    """Begin to sum x over the ranks, in place."""
    work: Work[Any] = strategy.comm.all_reduce(
        x, op="sum", out=x, algorithm=strategy.algorithm, async_op=True
    )
    return work


def predicted_sum(strategy: DataParallel, bucket: str, nbytes: int) -> PredictedCall:
    """Of one `all_reduce`."""
    return PredictedCall(strategy.phase_of(bucket), "all_reduce", strategy.algorithm, nbytes)


def num_elements(strategy: DataParallel, bucket: str) -> int:
    """Of a bucket."""
    return sum(strategy.model.sizes[unit] for unit in strategy.buckets[bucket])


@silently
def rounded(x: Array, dtype: np.dtype[Any]) -> Array:
    """x in this dtype; itself if it is."""
    return narrow(x, dtype)


@silently
def put(target: Array, values: Array) -> None:
    """Copy into `target`, rounded to its dtype."""
    target[...] = values
