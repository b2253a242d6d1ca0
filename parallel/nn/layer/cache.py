"""The keys and values of what attention has read, so that a text is continued token by token."""

from __future__ import annotations

from parallel.nn.functional import Array, namespace_of


class KeyValues:
    """The keys and values that attention layers keep of the tokens of a text so far.

    Pope et al. 2022.

    Examples
    --------
    >>> import numpy as np
    >>> cache = KeyValues()
    >>> one = np.zeros((1, 2, 1, 4))  # (batch, heads, tokens, width)
    >>> keys, _ = cache.extended("first", one, one)
    >>> keys, _ = cache.extended("first", one, one)
    >>> keys.shape, cache.nbytes
    ((1, 2, 2, 4), 256)
    """

    def __init__(self) -> None:
        self._kept: dict[object, tuple[Array, Array]] = {}

    def extended(self, owner: object, keys: Array, values: Array) -> tuple[Array, Array]:
        """Return the kept keys and values of an `owner`, followed by these `keys` and `values`.

        All arrays have the shape (batch, heads, tokens, width).  The result is kept.
        """
        if owner in self._kept:
            xp, before = namespace_of(keys), self._kept[owner]
            keys, values = (
                xp.concat([old, new], axis=2)
                for old, new in zip(before, (keys, values), strict=True)
            )
        self._kept[owner] = keys, values
        return keys, values

    @property
    def nbytes(self) -> int:
        """The bytes of all keys and values."""
        return sum(int(x.nbytes) for both in self._kept.values() for x in both)
