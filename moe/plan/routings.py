"""Where a routing comes from: drawn, made by a model on a text, or read from a log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from moe.layers import MixtureOfExperts, mixtures
from moe.models import moe_gpt
from moe.plan.training_step import on_one_rank
from moe.routing import Routing, RoutingLog
from parallel import Recipe, Trainer, text
from parallel.nn import VOCAB_SIZE, BatchRows


class BatchRouting(NamedTuple):
    """A log with the routing of a whole batch of `rows` of `context` tokens in a `step`."""

    log: RoutingLog
    step: int
    rows: int
    context: int


def uniform(model: Mapping[str, Any], rows: int, seed: int = 0) -> BatchRouting:
    """Return a routing as if all experts were equally good for each token.

    The logits of each token are independent standard normal numbers, by which the gate of each
    layer then routes: tokens choose any k experts with the same probability, and the capacity, the
    selection and second choices are as the gate makes them.  For hash routing, tokens are drawn.

    Parameters
    ----------
    model : mapping
        The options of `moe.moe_gpt`, with ``context``.
    rows : int
        The rows of the batch.
    seed : int
        The seed of the random numbers.
    """
    log, context = RoutingLog(), model["context"]
    for i, layer in enumerate(mixtures(moe_gpt(**on_one_rank(model)))):
        rng = np.random.default_rng([seed, i])
        log.add(0, layer.name, 0, _drawn(layer, rows, context, rng, seed))
    return BatchRouting(log, 0, rows, context)


def _drawn(
    layer: MixtureOfExperts, rows: int, context: int, rng: np.random.Generator, seed: int
) -> Routing:
    """Return the routing of random logits by the gate of a layer."""
    logits = rng.standard_normal((rows * context, layer.gate.num_experts))
    tokens = rng.integers(0, VOCAB_SIZE, rows * context)
    random = BatchRows(0, (range(rows),), seed).random(0, layer.name)
    groups = layer.options.num_groups(rows)
    return layer.gate.forward(logits, random, num_groups=groups, token_ids=tokens).routing


def on_text(
    model: Mapping[str, Any],
    rows: int,
    data: text.Bytes,
    *,
    seed: int = 0,
    steps: int = 1,
    recipe: Recipe | None = None,
) -> BatchRouting:
    """Return the routing of the last of some training steps on one rank.

    Parameters
    ----------
    model : mapping
        The options of `moe.moe_gpt`, with ``context``.
    rows : int
        The rows of the batch.
    data : array
        The text (`parallel.text.load`).
    seed : int
        The seed of the batches.
    steps : int
        The number of steps.  With 1, the initial values make the routing.
    recipe : Recipe, optional
        How to train; by default ``Recipe(seed=seed)``.

    Raises
    ------
    ValueError
        If the text is too short.
    """
    log, context = RoutingLog(), model["context"]
    trainer = Trainer(None, moe_gpt(**on_one_rank(model), log=log), recipe or Recipe(seed=seed))

    def batch(step: int, rank: int, num_ranks: int) -> tuple[text.Tokens, text.Tokens]:
        where = {"rank": rank, "num_ranks": num_ranks}
        return text.batch(data, seed=seed, step=step, batch_size=rows, context=context, **where)

    trainer.start()
    trainer.train(steps, batch, rows * context, lambda *_: None)
    return BatchRouting(log, steps - 1, rows, context)


def from_log(log: RoutingLog, *, step: int | None = None, rows_per_group: int = 1) -> BatchRouting:
    """Return a routing of a `log`, such as ``moe.train --save-routing`` writes.

    Parameters
    ----------
    log : RoutingLog
        The log of a whole batch.
    step : int, optional
        By default the last one.
    rows_per_group : int
        The rows that were routed together, from which the number of rows follows.

    Raises
    ------
    ValueError
        If the log has no such step, or is empty.
    """
    steps = sorted({number for number, _ in log.parts})
    if not steps:
        raise ValueError("the log has no routing")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ValueError(f"the log has no step {step}, only {steps[0]} to {steps[-1]}")
    name = next(name for number, name in log.parts if number == step)
    whole = log.whole(step, name)
    rows = whole.num_groups * rows_per_group
    if not rows or whole.num_tokens % rows:
        raise ValueError(
            f"{whole.num_tokens} tokens in {whole.num_groups} groups are not whole rows, if"
            f" {rows_per_group} rows were routed together"
        )
    return BatchRouting(log, step, rows, whole.num_tokens // rows)
