"""PowerSGD: gradients of low rank.  Vogels et al. 2019."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from parallel import placement
from parallel.accounts.calls import PredictedCall
from parallel.nn import Array, ParameterSpec, namespace_of, split_flat
from parallel.optim import master_dtype
from parallel.sharding.collective import (
    Axes,
    Group,
    HookState,
    copy_rounded,
    ignore_overflow,
    predicted_sum,
    start_sum,
)
from parallel.sharding.hooks import GeneratorHook

DEPENDENT = 1e-12  # relative length of what the other columns leave of a column: rounding only


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
    so their processors must round in the same way.

    `rank` is the r of the approximation, at least 1.  With `error_feedback` the error of a rank is
    added to its next gradient.  `seed` is that of the first Q, the same on all ranks.  A hook
    belongs to one training run: making another with it raises ValueError.

    Examples
    --------
    >>> from parallel import PowerSGD, Sharding
    >>> sharding = Sharding.ddp(hook=PowerSGD(4))
    """

    collectives = ("all_reduce",)

    def __init__(self, rank: int, *, error_feedback: bool = True, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"the rank of an approximation is {rank}: it must be at least 1")
        self.rank, self.error_feedback, self.seed = rank, error_feedback, seed
        self.bases: dict[str, Array] = {}  # Q of each matrix: (columns, rank), not normalized
        self.errors: dict[str, Array] = {}  # (rows, columns)

    # What is kept

    def allocate(self, group: Group) -> None:
        if self.bases:
            raise ValueError("this PowerSGD belongs to another strategy; make one for each")

        def new(rows: int, columns: int) -> Array:
            flat = group.new_buffer("buffers", rows * columns, master_dtype(group.dtype))
            return flat.reshape(rows, columns)

        for name, matrix in self._all_matrices(group).items():
            first = ParameterSpec((matrix.columns, self.rank), std=1.0)
            self.bases[name] = new(*first.shape)
            self.bases[name][...] = group.xp.asarray(first.draw(self.seed, f"basis.{name}"))
            if self.error_feedback:
                self.errors[name] = new(matrix.rows, matrix.columns)

    def state(self, group: Group) -> HookState:
        errors = {f"error.{name}": x for name, x in self.errors.items()}
        return HookState({f"basis.{name}": x for name, x in self.bases.items()}, errors)

    def state_bytes(self, group: Group) -> int:
        kept = [
            m.columns * (self.rank + m.rows * self.error_feedback)
            for m in self._all_matrices(group).values()
        ]
        return sum(kept) * master_dtype(group.dtype).itemsize

    def _all_matrices(self, group: Group) -> dict[str, Matrix]:
        """Return the matrices in all buckets of a `group`."""
        buckets = [self._split_bucket(group, bucket)[0] for bucket in group.buckets]
        return {name: matrix for matrices in buckets for name, matrix in matrices.items()}

    def _split_bucket(self, group: Group, bucket: str) -> tuple[dict[str, Matrix], list[slice]]:
        """Return the matrices of a `bucket` to approximate, and where its other parameters are."""
        matrices: dict[str, Matrix] = {}
        others: list[slice] = []
        stop, width = 0, master_dtype(group.dtype).itemsize
        for unit in group.buckets[bucket]:
            for name, shape in group.shapes(unit).items():
                size, rows = math.prod(shape), shape[0] if shape else 1  # a number: one row
                start, stop = stop, stop + size
                columns = size // rows if rows else 0
                if self.rank * (rows + columns) * width < rows * columns * group.dtype.itemsize:
                    matrices[name] = Matrix(slice(start, stop), rows, columns)
                else:
                    others.append(slice(start, stop))
        return matrices, others

    # A step

    def run(
        self, group: Group, bucket: str, flat: Array, axes: Axes
    ) -> Iterator[Callable[[], object]]:
        matrices, others = self._split_bucket(group, bucket)
        if not matrices:
            yield start_sum(group, axes, flat)
            return
        scale = group.loss_scale.value
        gradients = {name: flat[m.part].reshape(m.rows, m.columns) for name, m in matrices.items()}
        left, lefts = self._factors(group, {name: m.rows for name, m in matrices.items()})
        right, rights = self._factors(group, {name: m.columns for name, m in matrices.items()})
        exact = [flat[part] for part in others]
        rest = group.memory.track("buffers", group.xp.concat([flat[:0], *exact]))
        for name, gradient in gradients.items():
            self._compute_p(name, gradient, scale, lefts[name])
        for x in (left, rest):
            if x.shape[0]:
                yield start_sum(group, axes, x)
        for name, gradient in gradients.items():
            self._compute_q(name, gradient, scale, lefts[name], rights[name])
        yield start_sum(group, axes, right)
        for name, gradient in gradients.items():
            self._approximate(name, gradient, lefts[name], rights[name])
        sums = placement.split(rest, [x.shape[0] for x in exact])
        for x, total in zip(exact, sums, strict=True):
            x[...] = total

    def _factors(self, group: Group, lengths: dict[str, int]) -> tuple[Array, dict[str, Array]]:
        """Return one array to send, and a view (length, rank) of it for each matrix."""
        size = self.rank * sum(lengths.values())
        flat = group.new_buffer("buffers", size, master_dtype(group.dtype))
        return flat, split_flat(flat, {name: (n, self.rank) for name, n in lengths.items()})

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
        left += 0 * namespace_of(corrected).sum(corrected)  # NaN, also where 0 in Q meets an inf

    @ignore_overflow
    def _compute_q(
        self, name: str, gradient: Array, scale: float, left: Array, right: Array
    ) -> None:
        """Make the sum of all P orthonormal, set `right` to this rank's Q, and keep its error."""
        xp, corrected = namespace_of(gradient), self._with_error(name, gradient, scale)
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
        xp, basis = namespace_of(gradient), self.bases[name]
        copy_rounded(gradient, left @ right.T)
        lengths = xp.sqrt(xp.sum(right.astype(np.float64) ** 2, axis=0))
        is_good = xp.isfinite(lengths) & (lengths > 0)
        basis[...] = xp.where(is_good, right / xp.where(is_good, lengths, 1.0), basis)

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        sizes = self._sizes(group, bucket)
        return [predicted_sum(group, phase, n, axes, dtype) for n, dtype in sizes if n]

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        """Return the bytes of P, Q and the other parameters; 0 if the bucket has no matrix."""
        sizes = self._sizes(group, bucket)
        return sum(n * dtype.itemsize for n, dtype in sizes) if sizes[0][0] else 0

    def _sizes(self, group: Group, bucket: str) -> list[tuple[int, np.dtype[Any]]]:
        """Return the number of elements and the dtype: of P, of no matrix, and of Q."""
        matrices, others = self._split_bucket(group, bucket)
        return [
            (self.rank * sum(m.rows for m in matrices.values()), master_dtype(group.dtype)),
            (sum(map(placement.length, others)), group.dtype),
            (self.rank * sum(m.columns for m in matrices.values()), master_dtype(group.dtype)),
        ]


@ignore_overflow
def orthonormal(x: Array) -> Array:
    """Return the columns of `x` (rows, columns) made orthonormal from left to right, in float64.

    By the Gram-Schmidt method, which makes each column orthogonal to those before it twice (Giraud
    et al. 2005).  A column that depends on those before it becomes zero; NaN stays NaN.
    """
    xp = namespace_of(x)
    done = x.T.astype(np.float64, order="C")
    for k, column in enumerate(done):
        before = xp.sqrt(column @ column)
        for _ in range(2 if k else 0):
            column -= (done[:k] @ column) @ done[:k]
        rest = xp.sqrt(column @ column)
        is_independent = rest > DEPENDENT * before
        column *= is_independent / xp.where(is_independent, rest, 1.0)
    return done.T
