"""The gates of the literature, by name.

Gates with a `capacity_factor` limit how many tokens an expert takes.  `rule` is a name in
`moe.gates.capacity.RULES`, by default the rule of the paper; None: dropless, experts take all
tokens.  Expert choice has a rule of its own.  `bias`, `sigmoid` and `hash_layer` are dropless.

If the dtype of a model has two bytes, the router of every gate computes logits, scores and weights
in float32, and the sum of the experts' outputs is cast back to that dtype, as in Fedus et al. 2021.
"""

from __future__ import annotations

from collections.abc import Callable

from moe.gates.gate import Gate
from moe.gates.losses import Balance, Importance, Load, RouterZ
from moe.gates.scores import SIGMOID
from moe.gates.selections import NodeLimited, batch_priority, expert_choice, hashed, random_second


def gshard(
    num_experts: int,
    *,
    capacity_factor: float = 1.0,
    rule: str | None = "gshard",
    weight: float = 0.01,
) -> Gate:
    """Return the gate of Lepikhin et al. 2020 (GShard).

    A token goes to the best two of `num_experts` with weights that add up to 1; the second one is
    sampled.  An expert takes ceil(2 `capacity_factor` S / E) of the S tokens of a group, or what
    another `rule` says.  The auxiliary loss E sum_e f_e P_e has this `weight`.  It is the loss of
    the authors' program (Lingvo), whose size does not depend on E.  The loss of the paper is
    (1 / E) sum_e f_e P_e, which is 1 / E^2 of it: for the paper's loss with a weight of 0.01,
    `weight` is 0.01 / E^2.
    """
    return Gate(
        num_experts,
        2,
        selection=random_second,
        losses=(Balance(weight * num_experts),),
        rule=rule,
        capacity_factor=capacity_factor,
        is_normalized=True,
    )


def switch(
    num_experts: int,
    *,
    capacity_factor: float = 1.25,
    rule: str | None = "switch",
    weight: float = 0.01,
) -> Gate:
    """Return the gate of Fedus et al. 2021 (Switch Transformer).

    A token goes to the best of `num_experts`, with its probability as weight.  An expert takes
    ceil(`capacity_factor` S / E) of the S tokens of a group, or what another `rule` says.  The
    auxiliary loss E sum_e f_e P_e has this `weight`.  The router's initial weights are drawn with a
    tenth of the usual variance.  In the paper this is so for all weights of the model; here other
    layers are drawn as with any gate.
    """
    return Gate(
        num_experts,
        losses=(Balance(weight * num_experts),),
        rule=rule,
        capacity_factor=capacity_factor,
        init_scale=0.1,
    )


def choice(num_experts: int, *, capacity_factor: float = 2.0) -> Gate:
    """Return the gate of Zhou et al. 2022 (Expert Choice).

    Each of `num_experts` takes the `capacity_factor` S / E tokens of a group with its largest
    scores: the loads are equal, and a token may have any number of experts.  Whether an expert
    takes a token depends on later tokens, so a language model should not generate text with it.
    """
    return Gate(
        num_experts, selection=expert_choice, rule="expert-choice", capacity_factor=capacity_factor
    )


def v_moe(
    num_experts: int,
    *,
    k: int = 2,
    capacity_factor: float = 1.05,
    rule: str | None = "v-moe",
    weight: float = 0.01,
) -> Gate:
    """Return the gate of Riquelme et al. 2021 (V-MoE).

    A token goes to the best `k` of `num_experts` by logits with noise of standard deviation 1 / E;
    tokens with larger scores go first.  An expert takes round(k `capacity_factor` S / E) tokens of
    a group, raised to a multiple of 4, or what another `rule` says.  The mean of the importance
    and the load loss has this `weight`.
    """
    noise, half = 1 / num_experts, weight / 2
    return Gate(
        num_experts,
        k,
        selection=batch_priority,
        losses=(Importance(half), Load(half, noise)),
        rule=rule,
        capacity_factor=capacity_factor,
        noise=noise,
    )


def stable(
    num_experts: int,
    *,
    k: int = 2,
    capacity_factor: float = 1.25,
    rule: str | None = "gshard",
    weight: float = 0.01,
    z_weight: float = 0.001,
) -> Gate:
    """Return the gate of Zoph et al. 2022 (ST-MoE), for stable training and fine-tuning.

    A token goes to the best `k` of `num_experts` with weights that add up to 1; an expert takes
    ceil(k `capacity_factor` S / E) tokens of a group, or what another `rule` says.  The loss of
    Switch has this `weight`, and the mean squared log-sum-exp of the logits `z_weight`.
    """
    return Gate(
        num_experts,
        k,
        losses=(Balance(weight * num_experts), RouterZ(z_weight)),
        rule=rule,
        capacity_factor=capacity_factor,
        is_normalized=True,
    )


def bias(num_experts: int, *, k: int = 2, rate: float = 0.001) -> Gate:
    """Return the gate of Wang et al. 2024 (balancing without an auxiliary loss).

    A token goes to the best `k` of `num_experts` by sigmoid plus a bias, which changes by `rate` in
    each step against the load.  Experts take all tokens.
    """
    return Gate(num_experts, k, SIGMOID, bias_rate=rate, is_normalized=True)


def sigmoid(
    num_experts: int,
    *,
    k: int = 2,
    num_nodes: int = 1,
    most_nodes: int = 1,
    scale: float = 2.5,
    rate: float = 0.001,
    weight: float = 0.0001,
) -> Gate:
    """Return the gate of DeepSeek-AI 2024 (DeepSeek-V3).

    A token goes to the best `k` of `num_experts` by sigmoid plus a bias, from at most `most_nodes`
    of `num_nodes` equal nodes (hosts), with weights that add up to `scale`.  The bias changes by
    `rate`; the loss (E / k) sum_e f_e P_e of all choices has this `weight`.  Experts take all
    tokens.  Raises ValueError if nodes do not divide the experts, or have too few of them.
    """
    if not 1 <= most_nodes <= num_nodes or num_experts % num_nodes:
        raise ValueError(
            f"most_nodes is {most_nodes} and num_nodes {num_nodes}: most_nodes must be from 1 to"
            f" num_nodes, which must divide {num_experts} experts"
        )
    if k > most_nodes * (num_experts // num_nodes):
        raise ValueError(f"k is {k}: {most_nodes} of {num_nodes} nodes have fewer experts")
    return Gate(
        num_experts,
        k,
        SIGMOID,
        NodeLimited(num_nodes, most_nodes),
        (Balance(weight * num_experts / k, all_choices=True),),
        is_normalized=True,
        scale=scale,
        bias_rate=rate,
    )


def hash_layer(num_experts: int, *, k: int = 1) -> Gate:
    """Return the gate of Roller et al. 2021 (Hash Layers), the baseline without a router.

    A token has the `k` of `num_experts` experts that a hash of its number gives it.
    """
    return Gate(num_experts, k, selection=hashed, has_router=False)


GATES: dict[str, Callable[..., Gate]] = {
    "gshard": gshard,
    "switch": switch,
    "expert-choice": choice,
    "v-moe": v_moe,
    "stable": stable,
    "bias": bias,
    "sigmoid": sigmoid,
    "hash": hash_layer,
}
"""The gates of the literature: functions that return a `Gate`, by the names of ``--moe``."""
