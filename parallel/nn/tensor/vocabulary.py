"""Layers of which each rank has some tokens of the vocabulary."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from parallel.nn.functional import (
    Array,
    cast,
    check_classes,
    flatten_rows,
    namespace_of,
    one_hot,
    upcast,
)
from parallel.nn.layer import Activations, ArraySpec, LayerTraffic, ParameterSpec, Step
from parallel.nn.plain import CrossEntropy, Embedding, loss_of
from parallel.nn.tensor.linear import with_splits
from parallel.nn.tensor.region import Whole


class VocabularyEmbedding(Embedding):
    """An embedding of which every rank has the vectors of some tokens; `g` adds up the vectors.

    Parameters
    ----------
    vocab_size, context, dim : int
        As in `Embedding`.
    region : Whole
        The ranks, and what they have outside.
    """

    def __init__(self, vocab_size: int, context: int, dim: int, region: Whole) -> None:
        super().__init__(vocab_size, context, dim)
        self.region = region

    def specs(self) -> dict[str, ParameterSpec]:
        return with_splits(super().specs(), {"token": ((0, self.region.axis),)})

    def config(self) -> list[Any]:
        return [*super().config(), *self.region.config()]

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        self.check(x, step)
        xp, table = namespace_of(x), self.value["token"]
        index, is_mine = self._local(x)
        if table.shape[0]:
            rows = xp.take(table, xp.reshape(index, (-1,)), axis=0)
            rows = cast(rows * xp.reshape(is_mine, (-1, 1)), table.dtype)
        else:
            rows = xp.zeros((x.size, self.dim), dtype=table.dtype)
        vectors = self.region.g(xp.reshape(rows, (*x.shape, self.dim)))
        at = step.position_index(x)
        positions = self.value["position"][at]
        if vectors.shape[1] < x.shape[1]:
            positions = positions[self.region.part(x.shape[1])]
        return vectors + positions, (x, at)

    def _local(self, x: Array) -> tuple[Array, Array]:
        """Return the nearest vector of this rank for every token, and whether it is the token's.

        If this rank has no vectors, the indices do not matter.
        """
        part, xp = self.region.part(self.vocab_size), namespace_of(x)
        nearest = xp.clip(x, part.start, max(part.start, part.stop - 1))
        return nearest - part.start, nearest == x

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        tokens, at = saved
        return None, (tokens, at, self.region.g_backward(dy, tokens.shape[1]))

    def _selected(self, tokens: Array, dtype: Any) -> Array:
        index, is_mine = self._local(tokens)
        flat, mine = index.reshape(-1), is_mine.reshape(-1, 1)
        # The values may have been freed when only the gradient is computed.
        return one_hot(flat, self.gradient["token"].shape[0], dtype) * cast(mine, dtype)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        inner = super().activation_bytes(x)
        return inner._replace(
            out=self.region.left(inner.out), is_dy_in_rest=not self.region.gathers
        )

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        return self.region.g_traffic(super().activation_bytes(x).out)


class VocabularyCrossEntropy(CrossEntropy):
    """The loss of logits of which every rank has the logits of some classes; see `CrossEntropy`.

    For every target, ranks agree on the largest logit, and then add up two numbers in one call: the
    exponentials of all logits less the largest, and the target's own logit.  Every rank has the
    whole loss.

    Parameters
    ----------
    num_classes : int
        The number of classes, which ranks divide as evenly as possible.
    region : Whole
        The ranks.
    """

    def __init__(self, num_classes: int, region: Whole) -> None:
        super().__init__()
        self.num_classes, self.region = num_classes, region

    def config(self) -> list[Any]:
        return [*super().config(), self.num_classes, *self.region.config()]

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        xp, region = namespace_of(x), self.region
        flat, targets = upcast(flatten_rows(x)), xp.reshape(step.targets, (-1,))
        check_classes("target", step.on_host(step.targets), self.num_classes)
        options: dict[str, Any] = {"algorithm": region.algorithm}
        largest = xp.full((flat.shape[0], 1), -math.inf, dtype=flat.dtype)
        if flat.shape[1]:
            largest = xp.max(flat, axis=-1, keepdims=True)
        largest = region.comm.all_reduce(largest, "max", out=largest, **options)
        first = region.part(self.num_classes).start
        truth = one_hot(targets - first, flat.shape[1], flat.dtype)

        def add_up(sums: Array) -> Array:
            return region.comm.all_reduce(sums, out=sums, **options)

        loss, dlogits = loss_of(flat - largest, truth, step, add_up)
        return loss, cast(dlogits, x.dtype).reshape(x.shape)

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        wide, rows = replace(x, width=max(x.width, 4)), math.prod(x.shape[:-1])
        return LayerTraffic(tuple(self.region.call("all_reduce", n * rows, wide) for n in (1, 2)))
