"""Communication hooks for `DataParallel`, which sum gradients with fewer bytes.

For a bucket of n float32 elements on p ranks, of which rank d owns n(d), by ring all-reduces:

| hook            | calls for a bucket     | bytes sent by all ranks     | of an all-reduce's      |
|-----------------|------------------------|-----------------------------|-------------------------|
| `AllReduce`     | all_reduce             | 8 (p-1) n                   | all                     |
| `HalfPrecision` | all_reduce             | 4 (p-1) n                   | 1/2                     |
| `Int8Blocks`    | all_to_all, all_gather | 2 (p-1) sum over d of       | 1/4 + 1/256             |
|                 |                        | n(d) + 4 ceil(n(d) / 256)   |                         |
| `PowerSGD`      | all_reduce, up to 3    | 8 (p-1) r (rows + columns)  | r (rows + columns)      |
|                 |                        | of each matrix              | / (rows x columns)      |

All ranks receive the same bits.  An inf or a NaN on one rank leaves inf or NaN on all.  The buffers
of a strategy include what a hook keeps from step to step, but not what it sends and receives while
a bucket is summed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from collectives import Work, even_counts
from parallel import shards
from parallel.data_parallel import CommHook, Completion, DataParallel
from parallel.nn import Array, ParameterSpec, cast, split_flat
from parallel.precision import dtype_of, master_dtype
from parallel.quantization import BLOCK, dequantize, num_blocks, quantize, quantized_bytes
from parallel.traffic import PredictedCall

TWO_BYTES = ("float16", "bfloat16")
ALL_TO_ALL, ALL_GATHER = "linear", "ring"  # algorithms
DEPENDENT = 1e-12  # relative length of what the other columns leave of a column: rounding only

ignore_overflow = np.errstate(over="ignore", invalid="ignore")  # the result shows an overflow


class GeneratorHook(CommHook):
    """A hook written as one generator, which yields each call that it started and must wait for.

    Backward and the other buckets continue while the generator waits.
    """

    @abstractmethod
    def run(self, strategy: DataParallel, bucket: str, flat: Array) -> Iterator[Work[Any]]:
        """Replace `flat` by its sum over all ranks, and yield each call that it has started.

        The strategy starts it in the phase of the `bucket`, and continues after each call when
        that is complete.  Every rank must make the same calls in the same order.
        """

    def start(self, strategy: DataParallel, bucket: str, flat: Array) -> Completion:
        return advance(self.run(strategy, bucket, flat))


def advance(run: Iterator[Work[Any]]) -> Completion:
    """Let `run` start its next call; return a function that waits for it and advances again."""
    work = next(run, None)

    def finish() -> Completion | None:
        if work is None:
            return None
        work.wait()
        return advance(run)

    return finish


class HalfPrecision(GeneratorHook):
    """Sum gradients rounded to float16 or bfloat16.

    This takes one all-reduce of 2 n bytes for a bucket of n elements, in any dtype of the
    model.  In float16 a value beyond 65504 becomes inf, and one below 3e-8 becomes 0.  bfloat16
    has the range of float32, and a precision of 8 bits where float16 has 11.

    Parameters
    ----------
    dtype : {"float16", "bfloat16"}

    Raises
    ------
    ValueError
        For another dtype.

    Examples
    --------
    >>> from functools import partial
    >>> from parallel import DataParallel, HalfPrecision
    >>> make = partial(DataParallel, hook=HalfPrecision("bfloat16"))
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in TWO_BYTES:
            raise ValueError(f"dtype is {dtype!r}: it must be {' or '.join(TWO_BYTES)}")
        self.dtype = dtype_of(dtype)

    def run(self, strategy: DataParallel, bucket: str, flat: Array) -> Iterator[Work[Any]]:
        rounded = round_to(flat, self.dtype)
        yield all_reduce(strategy, rounded)
        if rounded is not flat:
            copy_rounded(flat, rounded)

    def traffic(self, strategy: DataParallel, bucket: str) -> list[PredictedCall]:
        nbytes = self.dtype.itemsize * num_elements(strategy, bucket)
        return [predicted_all_reduce(strategy, bucket, nbytes)]


class Int8Blocks(GeneratorHook):
    """Sum gradients quantized to eight bits, with a scale for every `block` elements.

    Rank d owns a part of n(d) elements of a bucket.  The others send it their values of this part,
    quantized; it adds them in float32 and sends the quantized sum to all.  So an element is
    rounded twice, for any number of ranks: on its way to the owner, by at most half a scale
    on each of the p - 1 other ranks, and on its way back.  See `parallel.quantization`.

    | collective | calls | bytes, all ranks                                        |
    |------------|-------|---------------------------------------------------------|
    | all_to_all | 1     | (p-1) sum over d of q(d) = n(d) + 4 ceil(n(d) / block)  |
    | all_gather | 1     | (p-1) sum over d of q(d)                                |

    Parameters
    ----------
    block : int
        At least 1, by default 256.  Raises ValueError for a smaller number.
    """

    def __init__(self, block: int = BLOCK) -> None:
        num_blocks(0, block)
        self.block = block

    def run(self, strategy: DataParallel, bucket: str, flat: Array) -> Iterator[Work[Any]]:
        comm, xp, me = strategy.comm, array_namespace(flat), strategy.comm.rank
        parts = [shards.span(flat.shape[0], comm.size, rank) for rank in range(comm.size)]
        sizes = self.part_bytes(strategy, bucket)
        table = [[n * (d != s) for d, n in enumerate(sizes)] for s in range(comm.size)]

        given = [quantize(flat[parts[d]], self.block) for d in range(comm.size) if d != me]
        sent = xp.concat([xp.empty(0, dtype=np.uint8), *given])
        received = xp.empty((comm.size - 1, sizes[me]), dtype=np.uint8)
        yield comm.all_to_all(
            sent, out=received.reshape(-1), counts=table, algorithm=ALL_TO_ALL, async_op=True
        )
        mine = quantize(self._sum(flat[parts[me]], received), self.block)
        whole = xp.empty(sum(sizes), dtype=np.uint8)
        yield comm.all_gather(mine, out=whole, counts=sizes, algorithm=ALL_GATHER, async_op=True)
        for part, packed in zip(parts, shards.split(whole, sizes), strict=True):
            copy_rounded(flat[part], dequantize(packed, shards.length(part), self.block))

    @ignore_overflow
    def _sum(self, own: Array, others: Array) -> Array:
        """Return the float32 sum of a part and the quantized parts of the others."""
        total = own.astype(np.float32)
        for packed in others:
            total += dequantize(packed, own.shape[0], self.block)
        return total

    def part_bytes(self, strategy: DataParallel, bucket: str) -> list[int]:
        """Return the bytes of each rank's quantized part of a `bucket` of the `strategy`."""
        counts = even_counts(num_elements(strategy, bucket), strategy.comm.size)
        return [quantized_bytes(n, self.block) for n in counts]

    def traffic(self, strategy: DataParallel, bucket: str) -> list[PredictedCall]:
        nbytes, phase = sum(self.part_bytes(strategy, bucket)), strategy.phase_of(bucket)
        return [
            PredictedCall(phase, "all_to_all", ALL_TO_ALL, nbytes),
            PredictedCall(phase, "all_gather", ALL_GATHER, nbytes),
        ]


class Matrix(NamedTuple):
    """A parameter that is sent as a low-rank approximation, and where its gradient is."""

    part: slice
    rows: int
    columns: int


class PowerSGD(GeneratorHook):
    """Approximate the sum S of gradients of each matrix by P Q' of low rank.

    Vogels et al. 2019.  Each step makes one step of the power method from the Q of the last step:
    P = S Q, made orthonormal, and Q = S'P.  Both are linear in S, so they are sums over ranks.

    Vectors (biases, norms), and matrices for which this saves nothing, are summed exactly.  With w
    bytes for an element of the model and W for one in updates (4 if w is 2), a bucket takes at most

    | collective | calls | bytes of the call                       | what                 |
    |------------|-------|-----------------------------------------|----------------------|
    | all_reduce | 1     | W r (sum of the matrices' rows)         | P                    |
    | all_reduce | 1     | w (number of elements in no matrix)     | the other parameters |
    | all_reduce | 1     | W r (sum of the matrices' columns)      | Q                    |

    A rank keeps W columns (r + rows) bytes for each matrix: Q, and the error, which is what the
    approximation left out of its gradient.  Errors are kept without the loss scale, and a gradient
    that overflowed does not change them.  What was sent and not used, because another gradient
    overflowed or no rank used the layer, is lost.  All ranks compute the same from the same sums,
    so their processors must round in the same way.  Checkpoints do not contain Q and the errors.

    Parameters
    ----------
    rank : int
        The rank r of the approximation, at least 1; else ValueError is raised.
    error_feedback : bool
        Whether the error of a rank is added to its next gradient.
    seed : int
        Of the first Q; the same on all ranks.

    Raises
    ------
    ValueError
        If a strategy is made with a hook that another strategy has already.

    Examples
    --------
    >>> import collectives
    >>> from parallel import DataParallel, PowerSGD, gpt
    >>> make = lambda comm: DataParallel(comm, gpt(num_layers=1), hook=PowerSGD(4)).size
    >>> collectives.run(make, size=2)
    [2, 2]
    """

    def __init__(self, rank: int, *, error_feedback: bool = True, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"the rank of an approximation is {rank}: it must be at least 1")
        self.rank, self.error_feedback, self.seed = rank, error_feedback, seed
        self.bases: dict[str, Array] = {}  # Q of each matrix: (columns, rank), not normalized
        self.errors: dict[str, Array] = {}  # (rows, columns)

    # What is kept

    def allocate(self, strategy: DataParallel) -> None:
        if self.bases:
            raise ValueError("this PowerSGD belongs to another strategy; make one for each")
        dtype = master_dtype(strategy.dtype)
        for name, matrix in self.all_matrices(strategy):
            spec = ParameterSpec((matrix.columns, self.rank), std=1.0)
            first = spec.draw(self.seed, f"basis.{name}")
            basis = strategy.new_buffer("buffers", first.size, dtype).reshape(first.shape)
            basis[...] = strategy.xp.asarray(first)
            self.bases[name] = basis
            if self.error_feedback:
                error = strategy.new_buffer("buffers", matrix.rows * matrix.columns, dtype)
                self.errors[name] = error.reshape(matrix.rows, matrix.columns)

    def state_bytes(self, strategy: DataParallel) -> int:
        each = (
            m.columns * (self.rank + m.rows * self.error_feedback)
            for _, m in self.all_matrices(strategy)
        )
        return sum(each) * master_dtype(strategy.dtype).itemsize

    def all_matrices(self, strategy: DataParallel) -> Iterator[tuple[str, Matrix]]:
        """Yield the name and place of each matrix in all buckets of a `strategy`."""
        for bucket in strategy.buckets:
            yield from self.split_bucket(strategy, bucket)[0].items()

    def split_bucket(
        self, strategy: DataParallel, bucket: str
    ) -> tuple[dict[str, Matrix], list[slice]]:
        """Return the matrices of a strategy's bucket that are approximated, by name.

        The second result are the slices of the bucket's other parameters.
        """
        matrices: dict[str, Matrix] = {}
        others: list[slice] = []
        stop = 0
        for unit in strategy.buckets[bucket]:
            for key, spec in strategy.model.units[unit].items():
                start, stop = stop, stop + math.prod(spec.shape)
                rows, columns = spec.shape[0], math.prod(spec.shape[1:])
                if self.saves_bytes(strategy, rows, columns):
                    matrices[f"{unit}.{key}"] = Matrix(slice(start, stop), rows, columns)
                else:
                    others.append(slice(start, stop))
        return matrices, others

    def saves_bytes(self, strategy: DataParallel, rows: int, columns: int) -> bool:
        """Return whether P and Q of a matrix of (rows, columns) are fewer bytes than the matrix.

        The strategy's dtype is that of the matrix; P and Q are in the dtype of its masters.
        """
        factors = self.rank * (rows + columns) * master_dtype(strategy.dtype).itemsize
        return bool(factors < rows * columns * strategy.dtype.itemsize)

    # A step

    def run(self, strategy: DataParallel, bucket: str, flat: Array) -> Iterator[Work[Any]]:
        matrices, others = self.split_bucket(strategy, bucket)
        if not matrices:
            yield all_reduce(strategy, flat)
            return
        xp, scale = array_namespace(flat), strategy.loss_scale.value
        gradients = {name: flat[m.part].reshape(m.rows, m.columns) for name, m in matrices.items()}
        left, lefts = self._factors(strategy, {name: m.rows for name, m in matrices.items()})
        right, rights = self._factors(strategy, {name: m.columns for name, m in matrices.items()})
        rest = xp.concat([flat[:0], *(flat[part] for part in others)])

        for name, gradient in gradients.items():
            self._compute_p(name, gradient, scale, lefts[name])
        yield from [all_reduce(strategy, x) for x in (left, rest) if x.shape[0]]
        for name, gradient in gradients.items():
            self._compute_q(name, gradient, scale, lefts[name], rights[name])
        yield all_reduce(strategy, right)
        for name, gradient in gradients.items():
            self._approximate(name, gradient, lefts[name], rights[name])
        for part, piece in zip(
            others, shards.split(rest, list(map(shards.length, others))), strict=True
        ):
            flat[part] = piece

    def _factors(
        self, strategy: DataParallel, lengths: dict[str, int]
    ) -> tuple[Array, dict[str, Array]]:
        """Return one array to send, and a view (length, rank) of it for each matrix."""
        specs = {name: ParameterSpec((length, self.rank)) for name, length in lengths.items()}
        size = self.rank * sum(lengths.values())
        flat = strategy.xp.empty(size, dtype=master_dtype(strategy.dtype))
        return flat, split_flat(flat, specs)

    def _with_error(self, name: str, gradient: Array, scale: float) -> Array:
        """Return this rank's gradient plus its error, both multiplied by the loss scale."""
        corrected = gradient.astype(self.bases[name].dtype)
        if self.error_feedback:
            corrected += scale * self.errors[name]
        return corrected

    @ignore_overflow
    def _compute_p(self, name: str, gradient: Array, scale: float, left: Array) -> None:
        """Set `left` to this rank's P."""
        corrected = self._with_error(name, gradient, scale)
        left[...] = corrected @ self.bases[name]
        left += 0 * array_namespace(corrected).sum(corrected)  # NaN, also where 0 in Q meets an inf

    @ignore_overflow
    def _compute_q(
        self, name: str, gradient: Array, scale: float, left: Array, right: Array
    ) -> None:
        """Make the sum of all P orthonormal, set `right` to this rank's Q, and keep its error."""
        xp, corrected = array_namespace(gradient), self._with_error(name, gradient, scale)
        is_finite = xp.all(xp.isfinite(left))
        left[...] = orthonormal(left)
        right[...] = corrected.T @ left
        if self.error_feedback:
            error = self.errors[name]
            corrected -= left @ right.T
            error[...] = xp.where(is_finite, corrected / scale, error)

    @ignore_overflow
    def _approximate(self, name: str, gradient: Array, left: Array, right: Array) -> None:
        """Set the gradient to P Q' of the summed P and Q, and keep Q for the next step.

        A column of the last Q stays if the new one is zero: its direction may be needed later.
        """
        xp, basis = array_namespace(gradient), self.bases[name]
        copy_rounded(gradient, left @ right.T)
        lengths = xp.sqrt(xp.sum(right.astype(np.float64) ** 2, axis=0))
        is_good = xp.isfinite(lengths) & (lengths > 0)
        basis[...] = xp.where(is_good, right / xp.where(is_good, lengths, 1.0), basis)

    def traffic(self, strategy: DataParallel, bucket: str) -> list[PredictedCall]:
        matrices, others = self.split_bucket(strategy, bucket)
        each = self.rank * master_dtype(strategy.dtype).itemsize
        sizes = [
            each * sum(m.rows for m in matrices.values()),
            strategy.dtype.itemsize * sum(map(shards.length, others)),
            each * sum(m.columns for m in matrices.values()),
        ]
        return [predicted_all_reduce(strategy, bucket, nbytes) for nbytes in sizes if nbytes]


@ignore_overflow
def orthonormal(x: Array) -> Array:
    """Return the columns of `x` (rows, columns) made orthonormal from left to right, in float64.

    By the Gram-Schmidt method, which makes each column orthogonal to those before it twice (Giraud
    et al. 2005).  A column that depends on those before it becomes zero; NaN stays NaN.
    """
    xp = array_namespace(x)
    done = x.T.astype(np.float64, order="C")
    for k, column in enumerate(done):
        before = xp.sqrt(column @ column)
        for _ in range(2 if k else 0):
            column -= (done[:k] @ column) @ done[:k]
        rest = xp.sqrt(column @ column)
        is_independent = rest > DEPENDENT * before
        column *= is_independent / xp.where(is_independent, rest, 1.0)
    return done.T


def all_reduce(strategy: DataParallel, x: Array) -> Work[Any]:
    """Start to sum `x` over the ranks, in place."""
    work: Work[Any] = strategy.comm.all_reduce(
        x, op="sum", out=x, algorithm=strategy.algorithm, async_op=True
    )
    return work


def predicted_all_reduce(strategy: DataParallel, bucket: str, nbytes: int) -> PredictedCall:
    """Return what one `all_reduce` of `nbytes` bytes sends."""
    return PredictedCall(strategy.phase_of(bucket), "all_reduce", strategy.algorithm, nbytes)


def num_elements(strategy: DataParallel, bucket: str) -> int:
    """Return the number of elements of a bucket."""
    return sum(strategy.model.unit_sizes[unit] for unit in strategy.buckets[bucket])


@ignore_overflow
def round_to(x: Array, dtype: np.dtype[Any]) -> Array:
    """Return `x` rounded to this dtype, without a copy if it has it."""
    return cast(x, dtype)


@ignore_overflow
def copy_rounded(target: Array, values: Array) -> None:
    """Copy `values` into `target`, rounded to its dtype."""
    target[...] = values
