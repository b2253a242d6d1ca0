"""A layer: one differentiable function with parameters.

A layer has three functions: ``forward`` returns the output and what backward needs of it,
``backward_input`` the derivative by the input, and ``backward_weight`` *adds* to the gradients of
the parameters, so that micro-batches accumulate.  What one function needs from another is returned
and passed on.  It is not stored in the layer, so that several micro-batches may be in progress.

A layer owns no memory.  It states which parameters it has (`Layer.specs`), and is given views of
arrays to work on (`Layer.bind`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from parallel.nn.functional import Array
from parallel.nn.layer.specs import Activations, ArraySpec, LayerTraffic, ParameterSpec
from parallel.nn.layer.step import Step


class Layer(ABC):
    """One differentiable function with parameters; the base class of all layers.

    A subclass defines `forward`, `backward_input` and `activation_bytes`; `specs` and
    `backward_weight` if it has parameters; and `traffic` if it communicates.  Arrays have any dtype
    of `parallel.optim.precision.DTYPES`.

    Attributes
    ----------
    value : dict of str to array
        This rank's boxes of the parameters while the layer is bound.
    gradient : dict of str to array
        The gradients, with the same shapes; empty if the layer is bound for forward only.
    saves_input : bool
        Whether what `forward` saves contains the input itself.
    needs_rows : bool
        Whether what the layer sends, keeps or draws at random depends on which rows of the batch it
        computes.
    context : int, optional
        The most positions of a row of the batch, if the layer limits them.
    comm_axes : tuple of str
        The axes of the mesh whose communicators the layer uses, without the axes along which its
        parameters are divided.  Ranks make communicators together: outside a trainer, get
        ``mesh[axis]`` for every axis on all ranks before the first forward.
    step_counts : array, optional
        What the layer has counted in this step, int64 (n,), if it counts anything.  After the
        update ranks add up their counts, and `end_step` gets the sum.
    """

    saves_input = True
    needs_rows = False
    context: int | None = None
    comm_axes: tuple[str, ...] = ()
    step_counts: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def __init__(self) -> None:
        self.value: dict[str, Array] = {}
        self.gradient: dict[str, Array] = {}

    def specs(self) -> dict[str, ParameterSpec]:
        """Return the parameters of this layer by name.  By default a layer has none."""
        return {}

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        """Read parameters from the arrays `values`, and add gradients to the arrays `gradients`."""
        self.value, self.gradient = values, gradients

    @abstractmethod
    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        """Return the output for input `x` in a `step`, and what backward needs."""

    @abstractmethod
    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        """Return the derivative of the loss by the input, and what `backward_weight` needs.

        `dy` is the derivative by the output; `saved` is what `forward` returned.
        """

    def backward_weight(self, rest: Any) -> None:
        """Add the derivatives by the parameters to `gradient`; `rest` is from `backward_input`."""
        assert rest is None, f"{type(self).__name__} does not define backward_weight"

    def backward(self, dy: Array, saved: Any) -> Array:
        """Do both halves of backward, and return the derivative by the input.

        `dy` and `saved` are as in `backward_input`.
        """
        dx, rest = self.backward_input(dy, saved)
        self.backward_weight(rest)
        return dx

    @abstractmethod
    def activation_bytes(self, x: ArraySpec) -> Activations:
        """Return what the layer keeps for an input `x`, on the rank that has `x`.

        An array that a previous layer saved, and that this layer passes on, is not counted again.
        """

    def out(self, x: ArraySpec) -> ArraySpec:
        """Return the output for an input `x`, on the rank that has `x`."""
        return self.activation_bytes(x).out

    def check_input(self, x: ArraySpec) -> None:
        """Raise ValueError if `forward` would refuse an input `x`, on the rank that has `x`.

        The inputs of all ranks are checked before anything is sent.  Whatever `forward` checks
        without the data is checked here too, so that no rank fails alone in a step.
        """
        return

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        """Return the calls that the layer makes for an input `x`, on the rank that has `x`.

        The calls have no phase and no groups: the group of that rank along their axis makes them.
        """
        return LayerTraffic()

    def end_step(self, counts: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Use `counts`, the sum of the `step_counts` of all ranks."""
        raise NotImplementedError(f"{type(self).__name__} counts nothing")

    def state(self) -> list[float]:
        """Return the numbers that change from step to step and are no parameters.

        Checkpoints contain them.
        """
        return []

    def load_state(self, state: Sequence[float]) -> None:
        """Set the numbers that `state` returned."""
        assert not state, f"{type(self).__name__} has no state"

    def parts(self, name: str = "") -> Iterator[tuple[str, Layer]]:
        """Yield this layer and all layers in it, with their names; its own is `name`."""
        yield name, self

    def config(self) -> list[Any]:
        """Return what must be equal on all ranks and is not visible in the parameters' shapes.

        The result consists of lists, strings and numbers.  Ranks compare its digest.
        """
        return [type(self).__name__]
