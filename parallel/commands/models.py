"""The model that the options of a command describe."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from collectives import Communicator
from parallel.commands.presets import DENSE_AXES
from parallel.mesh import Mesh
from parallel.nn import Model, gpt
from parallel.options import gpt_arguments

RECOMPUTE = {"all": ("block*",), "attention": ("block*.attention.heads",), "none": ()}


@dataclass(frozen=True)
class ModelSpec:
    """A model that a command can train, on one rank.

    Parameters
    ----------
    make : function
        Called with the mesh whose ranks divide the model, or with None; returns the model.
    mesh : mapping of str to int, optional
        The axes of the mesh that the options name.
    axes : sequence of str
        The axes along which ranks can divide the model, or a row of its batch.
    row_options : sequence of str
        The given options, such as ``["dropout"]``, that add layers whose result depends on which
        rows of the batch a rank has.
    output_files : mapping of str to Path or None
        The files that are written for the model, by the options that name them.
    finish : function, optional
        Called with the model and the communicator, on all ranks, after the last step and before the
        traffic is predicted.  It lets layers know what their traffic depended on.
    """

    make: Callable[[Mesh | None], Model]
    mesh: Mapping[str, int] | None = None
    axes: Sequence[str] = DENSE_AXES
    row_options: Sequence[str] = ()
    output_files: Mapping[str, Path | None] = field(default_factory=dict)
    finish: Callable[[Model, Communicator], None] | None = None


SpecOf = Callable[[argparse.Namespace, int], ModelSpec]  # the options and the number of ranks


def dense_spec(options: argparse.Namespace, num_ranks: int) -> ModelSpec:
    """Return the dense GPT of the `options` of a training command, for any `num_ranks`."""
    row_options = ["dropout"] if options.dropout else []
    return ModelSpec(partial(dense_gpt, options), options.mesh, row_options=row_options)


def dense_gpt(options: argparse.Namespace, mesh: Mesh | None) -> Model:
    """Return the GPT of the command line."""
    return gpt(**gpt_options(options, mesh))


def gpt_options(options: argparse.Namespace, mesh: Mesh | None) -> dict[str, Any]:
    """Return the options of a training command as arguments of `parallel.gpt`, with a `mesh`."""
    return {
        **gpt_arguments(options),
        "mesh": mesh,
        "recompute": RECOMPUTE[options.recompute],
        "dropout": options.dropout,
        "sequence_parallel": options.sequence_parallel,
        "attention": options.attention or "ring",
    }
