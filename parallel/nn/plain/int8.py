"""Products of matrices in 8-bit integers, which add up in 32 bits.

An array becomes integers from -127 to 127 and a scale, the largest magnitude divided by 127 (a
symmetric quantization).  The product of the integers is exact; multiplied by both scales, it is the
product of the rounded arrays.  With one scale for a whole matrix, a single large element takes the
digits of all others.  With a scale for every row of the left matrix and for every column of the
right one, the large element costs only its own row or column (Dettmers et al. 2022, LLM.int8).
"""

from __future__ import annotations

import numpy as np

from parallel.nn.functional import Array, namespace_of, scales_for

LARGEST = 127
MOST_TERMS = (2**31 - 1) // LARGEST**2  # whose sum fits 32 bits: 133144
SCALES = ("tensorwise", "rowwise")


def check_int8(scales: str | None, num_terms: int) -> None:
    """Raise ValueError unless products of `num_terms` terms can have these `scales`.

    None as `scales` stands for products that are not computed in 8-bit integers.
    """
    if scales is not None and scales not in SCALES:
        raise ValueError(f"int8 is {scales!r}: it must be None or one of {', '.join(SCALES)}")
    if scales is not None and num_terms > MOST_TERMS:
        raise ValueError(f"a sum of {num_terms} products of int8 may not fit 32 bits")


ignore_invalid = np.errstate(invalid="ignore")  # the scale shows what is not finite


@ignore_invalid
def quantized(x: Array, axis: int | None) -> tuple[Array, Array]:
    """Return `x` as int8, and the scales of its vectors along an `axis`.

    `x` is a matrix of float32 or float64, and so are the scales, with a dimension of 1 along the
    axis.  Without an axis there is one scale for all elements.  The integers times the scales
    differ from `x` by at most half a scale.  The scale of a vector with infinite elements is
    infinite, and the scale of a vector with NaN is NaN.
    """
    xp = namespace_of(x)
    shape = tuple(1 if axis in (None, i) else n for i, n in enumerate(x.shape))
    largest = xp.zeros(shape, dtype=x.dtype)
    if x.size:
        largest = xp.max(xp.abs(x), axis=axis, keepdims=True)
    scales = scales_for(largest, LARGEST)
    return xp.round(x / scales).astype(np.int8), scales


@ignore_invalid
def int8_matmul(a: Array, b: Array, scales: str) -> Array:
    """Return ``a @ b``, computed in 8-bit integers, in the dtype of `a`.

    Parameters
    ----------
    a, b : array
        Matrices of float32 or float64.
    scales : str
        ``"rowwise"``: every row of `a` and every column of `b` has a scale.  ``"tensorwise"``: `a`
        has one scale, and `b` has one.

    Examples
    --------
    >>> import numpy as np
    >>> from parallel.nn.plain.int8 import int8_matmul
    >>> a, b = np.array([[1.0, 0.5], [1000.0, 500.0]]), np.array([[1.0], [1.0]])
    >>> int8_matmul(a, b, "rowwise").round(3).ravel().tolist()
    [1.504, 1503.937]
    >>> int8_matmul(a, b, "tensorwise").round(3).ravel().tolist()
    [0.0, 1503.937]
    """
    is_rowwise = scales == "rowwise"
    rows, row_scales = quantized(a, 1 if is_rowwise else None)
    columns, column_scales = quantized(b, 0 if is_rowwise else None)
    total = rows.astype(np.int32) @ columns.astype(np.int32)
    product: Array = total.astype(a.dtype) * row_scales * column_scales
    return product
