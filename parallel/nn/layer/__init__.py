"""What a layer is, and layers that are made of layers.

A layer is described by specs before arrays exist, and it computes in a training step.
"""

from parallel.nn.layer.cache import KeyValues
from parallel.nn.layer.layer import Layer
from parallel.nn.layer.recompute import Recompute, recomputed
from parallel.nn.layer.sequential import Residual, Sequential, by_layer
from parallel.nn.layer.specs import Activations, ArraySpec, BatchRows, LayerTraffic, ParameterSpec
from parallel.nn.layer.step import Step, token_numbers

__all__ = [
    "Activations",
    "ArraySpec",
    "BatchRows",
    "KeyValues",
    "Layer",
    "LayerTraffic",
    "ParameterSpec",
    "Recompute",
    "Residual",
    "Sequential",
    "Step",
    "by_layer",
    "recomputed",
    "token_numbers",
]
