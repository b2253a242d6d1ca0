"""The activation memory of a transformer layer by published formulas, beside that of our blocks.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", table 2:
bytes a layer with numbers of two bytes, for s tokens in each of b rows, h elements a vector, a
heads, and t tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from docs.generate.sections import table
from parallel import Mesh, gpt
from parallel.nn import ArraySpec

WIDTH = 2  # bytes of a number
GPT_3 = {"rows": 1, "context": 2048, "hidden": 12288, "num_heads": 96}
NUM_RANKS = 8  # in the table
HEADS = ["block*.attention.heads"]  # what selective recomputation computes again
NO_MASKS = "no masks of dropout after attention and MLP"
NO_DROPOUT = "probabilities kept once: no dropout, so neither its mask nor its output"
DEVIATIONS = "an inverse deviation in float32 for each vector that a layer norm normalizes"
GATHERED = "whole inputs of the two column-parallel layers"


def section() -> str:
    """Return the table for a block of GPT-3, in MiB."""
    rows = [
        [row.technique, row.formula, f"{row.paper >> 20}", f"{row.ours >> 20}"]
        for row in activation_rows(Mesh(None, tensor=NUM_RANKS), **GPT_3)
    ]
    return table(["technique", "formula"], ["paper", "ours"], rows)


class ActivationRow(NamedTuple):
    """What a layer keeps on a rank with one technique, in bytes.

    Attributes
    ----------
    technique, formula : str
        The technique, and the paper's formula for it.
    paper, ours : int
        The bytes by the formula, and the bytes that our block keeps (`Layer.activation_bytes`).
    differences : dict of str to int
        Reasons why our bytes differ, and the bytes for every reason, whose sum is ``ours - paper``.
    """

    technique: str
    formula: str
    paper: int
    ours: int
    differences: dict[str, int]


def activation_rows(
    mesh: Mesh, *, rows: int, context: int, hidden: int, num_heads: int
) -> list[ActivationRow]:
    """Return the paper's table, with what a block of `gpt` keeps on this rank of a `mesh`.

    Parameters
    ----------
    mesh : Mesh
        A mesh with an axis ``tensor`` of t ranks.
    rows, context, hidden, num_heads : int
        b, s, h and a.

    Raises
    ------
    ValueError
        Unless t divides `context` and `num_heads`: the formulas are of ranks with equal parts.
    """
    t = mesh.axes["tensor"]
    if context % t or num_heads % t:
        raise ValueError(f"{t} ranks do not divide {context} tokens and {num_heads} heads equally")
    s, b, h, a = context, rows, hidden, num_heads
    vectors, scores = s * b * h, a * s * s * b // t
    masks, norms = {NO_MASKS: -2 * vectors}, {DEVIATIONS: 8 * s * b}
    whole = masks | norms
    part = {reason: nbytes // t for reason, nbytes in whole.items()}
    attention, gathered = {NO_DROPOUT: -3 * scores}, {GATHERED: 4 * (vectors - vectors // t)}
    tensor, sequence = vectors * 10 + vectors * 24 // t, 34 * vectors // t

    def row(technique: str, formula: str, paper: int, why: dict[str, int], **how: Any) -> Any:
        model = gpt(num_layers=1, hidden=h, num_heads=a, context=s, mesh=mesh, **how)
        kept = model.activation_bytes(ArraySpec.tokens(b, s, WIDTH, rank=mesh.rank))["block0"]
        return ActivationRow(technique, formula, paper, kept.saved, why)

    return [
        row("tensor parallel", "sbh (10 + 24/t + 5as/ht)", tensor + 5 * scores, whole | attention),
        row(
            "tensor and sequence parallel",
            "sbh/t (34 + 5as/h)",
            sequence + 5 * scores,
            part | attention,
            sequence_parallel="gather",
        ),
        row(
            "the same, gathered inputs kept",
            "sbh/t (34 + 5as/h)",
            sequence + 5 * scores,
            part | attention | gathered,
            sequence_parallel="keep",
        ),
        row("tensor parallel, heads again", "sbh (10 + 24/t)", tensor, whole, recompute=HEADS),
        row(
            "tensor and sequence, heads again",
            "34 sbh/t",
            sequence,
            part,
            sequence_parallel="gather",
            recompute=HEADS,
        ),
        row("all again", "2 sbh", 2 * vectors, {}, recompute=["block*"]),
    ]
