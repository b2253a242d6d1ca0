"""Auxiliary losses of a group of tokens, and their derivatives.

With S tokens in a group and E experts, f_e the fraction of the tokens that choose expert e, and P_e
the mean of its normalized scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moe.gates.scores import TINY, softmax, softmax_backward
from moe.routing import Integers, Values

SQRT_2 = math.sqrt(2)
erf: Callable[[Values], Values] = np.vectorize(math.erf, otypes=[np.float64])


class LossInput(NamedTuple):
    """What a loss may know of a group: arrays (S, E), and how often experts were chosen (E,).

    `noisy` are the logits with noise; without noise they are the logits.  `firsts` counts first
    choices, `choices` counts all.
    """

    logits: Values
    noisy: Values
    scores: Values
    firsts: Integers
    choices: Integers
    k: int


class Slope(NamedTuple):
    """The value of a loss, and its derivatives by logits and by scores."""

    value: float
    dlogits: Values | float = 0.0
    dscores: Values | float = 0.0


@dataclass(frozen=True)
class Balance:
    """`factor` times the sum of f_e P_e; f_e of first choices, or of `all_choices`.

    With factor alpha E this is the loss of Fedus et al. 2021 (Switch), and of the program of
    Lepikhin et al. 2020 (GShard); with alpha / E, the formula in the paper on GShard; with
    alpha E / k and all choices, the sequence-wise loss of DeepSeek-AI 2024.
    """

    factor: float
    all_choices: bool = False

    def __call__(self, group: LossInput) -> Slope:
        """Return the loss of a `group`."""
        counts = group.choices if self.all_choices else group.firsts
        size = len(group.scores)
        totals = group.scores.sum(axis=-1, keepdims=True) + TINY
        normalized = group.scores / totals
        weights = self.factor * counts / size**2
        along = normalized @ weights
        return Slope(float(along.sum()), dscores=(weights - along[:, None]) / totals)


@dataclass(frozen=True)
class Importance:
    """`factor` times the squared coefficient of variation of the experts' summed softmax.

    Shazeer et al. 2017; Riquelme et al. 2021 (V-MoE).
    """

    factor: float

    def __call__(self, group: LossInput) -> Slope:
        """Return the loss of a `group`."""
        probabilities = softmax(group.logits)
        value, slope = squared_variation(probabilities.sum(axis=0))
        along = np.broadcast_to(self.factor * slope, probabilities.shape)
        return Slope(self.factor * value, softmax_backward(probabilities, along))


@dataclass(frozen=True)
class Load:
    """`factor` times the squared coefficient of variation of the experts' expected loads.

    The load of expert e is the sum over tokens of the probability that its logit with new Gaussian
    noise of this standard deviation `noise` is at least the k-th largest logit with noise.
    Riquelme et al. 2021 (V-MoE), appendix A.
    """

    factor: float
    noise: float

    def __post_init__(self) -> None:
        if not self.noise > 0:
            raise ValueError(f"noise is {self.noise}: without any, loads have no derivatives")

    def __call__(self, group: LossInput) -> Slope:
        """Return the loss of a `group`."""
        last = np.argsort(-group.noisy, axis=-1, kind="stable")[:, group.k - 1 : group.k]
        least = np.take_along_axis(group.noisy, last, axis=-1)
        z = (least - group.logits) / self.noise
        wins = 0.5 * (1 - erf(z / SQRT_2))
        value, slope = squared_variation(wins.sum(axis=0))
        density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        dlogits = self.factor * slope * density / self.noise
        at_least = np.take_along_axis(dlogits, last, axis=-1) - dlogits.sum(axis=-1, keepdims=True)
        np.put_along_axis(dlogits, last, at_least, axis=-1)
        return Slope(self.factor * value, dlogits)


@dataclass(frozen=True)
class RouterZ:
    """`factor` times the mean of the squared log-sum-exp of the logits.  Zoph et al. 2022."""

    factor: float

    def __call__(self, group: LossInput) -> Slope:
        """Return the loss of a `group`."""
        largest = group.logits.max(axis=-1, keepdims=True)
        logs = largest + np.log(np.exp(group.logits - largest).sum(axis=-1, keepdims=True))
        value = self.factor * float(np.mean(logs * logs))
        return Slope(value, softmax(group.logits) * (2 * self.factor / len(logs)) * logs)


Loss = Callable[[LossInput], Slope]


def squared_variation(x: Values) -> tuple[float, Values]:
    """Return the squared coefficient of variation, variance / mean^2, and its derivatives."""
    mean, variance = x.mean(), x.var()
    slope: Values = 2 * ((x - mean) / mean**2 - variance / mean**3) / len(x)
    return float(variance / mean**2), slope
