"""How many tokens of a group an expert takes at most: the rules of several systems.

With S tokens in a group, E experts, k experts for each token and a capacity factor f > 0:

- ``gshard``, ``switch``: ceil(S k f / E).  Lepikhin et al. 2020 (GShard, with k = 2); Fedus et al.
  2021 (Switch Transformer, with k = 1).
- ``deepspeed``: max(4, ceil(S k f / E)).  Rajbhandari et al. 2022 (DeepSpeed-MoE); 4 is the default
  of `min_capacity` in its program.
- ``tutel``: k int(f ceil(S / E)).  Hwang et al. 2023 (Tutel), as in its program.
- ``v-moe``: round(S k f / E), raised to a multiple of 4.  Riquelme et al. 2021 (V-MoE).
- ``expert-choice``: min(S, int(S k f / E)), which each expert takes exactly.  Zhou et al. 2022.

Without a rule (None) experts take all tokens, and none is dropped: dropless.

Tutel gives two more meanings to f.  With f = 0 nothing is dropped, and as many rows are sent for
each expert as the fullest one needs: here that is no rule, with padding ``"needed"``.  With f < 0
the capacity is that of -f, and as many rows are sent as the fullest expert needs within it: here
that is the rule ``tutel`` with the factor -f, with padding ``"needed"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

Rule = Callable[[int, int, int, float], int]
"""Called with S, E, k and f; returns the capacity."""


def share(num_tokens: int, num_experts: int, k: int, factor: float) -> Fraction:
    """Return S k f / E, without rounding."""
    return Fraction(num_tokens * k, num_experts) * as_written(factor)


def as_written(factor: float) -> Fraction:
    """Return the decimal number that a factor is written as: 1.1 is 11 / 10."""
    return Fraction(repr(float(factor)))  # NumPy writes np.float64(1.1)


def gshard(num_tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Return ceil(S k f / E).  Lepikhin et al. 2020; with k = 1, Fedus et al. 2021 (Switch)."""
    return math.ceil(share(num_tokens, num_experts, k, factor))


def deepspeed(num_tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Return ceil(S k f / E), but at least 4.  Rajbhandari et al. 2022 (DeepSpeed-MoE)."""
    return max(4, gshard(num_tokens, num_experts, k, factor))


def tutel(num_tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Return k int(f ceil(S / E)).  Hwang et al. 2023 (Tutel)."""
    mean = math.ceil(Fraction(num_tokens, num_experts))
    return k * int(as_written(factor) * mean)


def v_moe(num_tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Return round(S k f / E), raised to a multiple of 4.  Riquelme et al. 2021 (V-MoE)."""
    return 4 * math.ceil(Fraction(round(share(num_tokens, num_experts, k, factor)), 4))


def expert_choice(num_tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Return S k f / E rounded down, at most S: what each expert takes.  Zhou et al. 2022."""
    return min(num_tokens, int(share(num_tokens, num_experts, k, factor)))


RULES: dict[str, Rule] = {
    "gshard": gshard,
    "switch": gshard,
    "deepspeed": deepspeed,
    "tutel": tutel,
    "v-moe": v_moe,
    "expert-choice": expert_choice,
}
"""How many tokens an expert takes: the rules of the literature, by the `rule` of a `Gate`."""
