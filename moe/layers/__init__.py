"""Layers with experts, and the router that tells each token its experts.

A `MixtureOfExperts` is a layer of `parallel.nn`: it owns no memory, and says what it sends.
"""

from moe.layers.mixture import MixtureOfExperts, mixtures
from moe.layers.sum_of_layers import SumOfLayers

__all__ = ["MixtureOfExperts", "SumOfLayers", "mixtures"]
