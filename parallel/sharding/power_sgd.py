"""PowerSGD: gradients of low rank.  Vogels et al. 2019."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from parallel.accounts import PredictedCall
from parallel.mesh import length, split
from parallel.nn import Array, ParameterSpec, namespace_of, split_flat
from parallel.optim import Optimizer, master_dtype
from parallel.sharding.collective import (
    Arrays,
    Axes,
    HookState,
    View,
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
    that overflowed does not change them.  A sum that is not used, because another gradient
    overflowed or no rank used the layer, is lost.  All ranks compute the same from the same sums,
    so their processors must round in the same way.

    `rank` is the r of the approximation, at least 1.  With `error_feedback` the error of a rank is
    added to its next gradient.  `seed` is the seed of the first Q, the same on all ranks.  A hook
    belongs to one training run: another run with it raises ValueError.

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

    def allocate(self, arrays: Arrays) -> None:
        if self.bases:
            raise ValueError("this PowerSGD belongs to another strategy; make one for each")

        def new(rows: int, columns: int) -> Array:
            flat = arrays.new_buffer("buffers", rows * columns, master_dtype(arrays.view.dtype))
            return flat.reshape(rows, columns)

        for name, matrix in self._all_matrices(arrays.view).items():
            first = ParameterSpec((matrix.columns, self.rank), std=1.0)
            self.bases[name] = new(*first.shape)
            self.bases[name][...] = arrays.xp.asarray(first.draw(self.seed, f"basis.{name}"))
            if self.error_feedback:
                self.errors[name] = new(matrix.rows, matrix.columns)

    def state(self, optimizer: Optimizer) -> HookState:
        errors = {f"error.{name}": x for name, x in self.errors.items()}
        return HookState({f"basis.{name}": x for name, x in self.bases.items()}, errors)

    def state_bytes(self, view: View) -> int:
        kept = [
            m.columns * (self.rank + m.rows * self.error_feedback)
            for m in self._all_matrices(view).values()
        ]
        return sum(kept) * master_dtype(view.dtype).itemsize

    def _all_matrices(self, view: View) -> dict[str, Matrix]:
        """Return the matrices in all buckets of a `view`."""
        buckets = [self._split_bucket(view, bucket)[0] for bucket in view.buckets]
        return {name: matrix for matrices in buckets for name, matrix in matrices.items()}

    def _split_bucket(self, view: View, bucket: str) -> tuple[dict[str, Matrix], list[slice]]:
        """Return the matrices of a `bucket` to approximate, and where its other parameters are."""
        matrices: dict[str, Matrix] = {}
        others: list[slice] = []
        stop, width = 0, master_dtype(view.dtype).itemsize
        for unit in view.buckets[bucket]:
            for name, shape in view.shapes(unit).items():
                size, rows = math.prod(shape), shape[0] if shape else 1  # a number: one row
                start, stop = stop, stop + size
                columns = size // rows if rows else 0
                if self.rank * (rows + columns) * width < rows * columns * view.dtype.itemsize:
                    matrices[name] = Matrix(slice(start, stop), rows, columns)
                else:
                    others.append(slice(start, stop))
        return matrices, others

    # A step

    def run(
        self, arrays: Arrays, bucket: str, flat: Array, axes: Axes
    ) -> Iterator[Callable[[], object]]:
        matrices, others = self._split_bucket(arrays.view, bucket)
        if not matrices:
            yield start_sum(arrays, axes, flat)
            return
        scale = arrays.loss_scale.value
        gradients = {name: flat[m.part].reshape(m.rows, m.columns) for name, m in matrices.items()}
        left, lefts = self._factors(arrays, {name: m.rows for name, m in matrices.items()})
        right, rights = self._factors(arrays, {name: m.columns for name, m in matrices.items()})
        exact = [flat[part] for part in others]
        rest = arrays.memory.track("buffers", arrays.xp.concat([flat[:0], *exact]))
        for name, gradient in gradients.items():
            self._compute_p(name, gradient, scale, lefts[name])
        for x in (left, rest):
            if x.shape[0]:
                yield start_sum(arrays, axes, x)
        for name, gradient in gradients.items():
            self._compute_q(name, gradient, scale, lefts[name], rights[name])
        yield start_sum(arrays, axes, right)
        for name, gradient in gradients.items():
            self._approximate(name, gradient, lefts[name], rights[name])
        sums = split(rest, [x.shape[0] for x in exact])
        for x, total in zip(exact, sums, strict=True):
            x[...] = total

    def _factors(self, arrays: Arrays, lengths: dict[str, int]) -> tuple[Array, dict[str, Array]]:
        """Return one array to send, and a view (length, rank) of it for each matrix."""
        size = self.rank * sum(lengths.values())
        flat = arrays.new_buffer("buffers", size, master_dtype(arrays.view.dtype))
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

    def traffic(self, view: View, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        sizes = self._sizes(view, bucket)
        return [predicted_sum(view, phase, n, axes, dtype) for n, dtype in sizes if n]

    def buffer_bytes(self, view: View, bucket: str, axes: Axes) -> int:
        """Return the bytes of P, Q and the other parameters; 0 if the bucket has no matrix."""
        sizes = self._sizes(view, bucket)
        return sum(n * dtype.itemsize for n, dtype in sizes) if sizes[0][0] else 0

    def _sizes(self, view: View, bucket: str) -> list[tuple[int, np.dtype[Any]]]:
        """Return the number of elements and the dtype of P, of the other parameters, and of Q."""
        matrices, others = self._split_bucket(view, bucket)
        return [
            (self.rank * sum(m.rows for m in matrices.values()), master_dtype(view.dtype)),
            (sum(map(length, others)), view.dtype),
            (self.rank * sum(m.columns for m in matrices.values()), master_dtype(view.dtype)),
        ]


@ignore_overflow
def orthonormal(x: Array) -> Array:
    """Return the columns of `x` (rows, columns) made orthonormal from left to right, in float64.

    The Gram-Schmidt method is applied twice to each column (Giraud et al. 2005).  A column that
    depends on the columns before it becomes zero; NaN stays NaN.
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
