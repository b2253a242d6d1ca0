"""Generate text with a trained model: forward passes on the ranks of a mesh, one token at a time.

The first pass reads the beginning of each text, and each later pass one token.  Attention keeps the
keys and values of the tokens read so far (`parallel.nn.KeyValues`), so that nothing is computed
twice.  Ranks along ``data`` and ``expert`` have different texts, and ranks along ``tensor`` parts
of the model.  Which token is chosen does not depend on the mesh.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

import collectives
from collectives import even_counts
from parallel.accounts import PhaseFunction, PredictedCall, merged
from parallel.mesh import Mesh, span
from parallel.nn import Array, ArraySpec, BatchRows, Embedding, KeyValues, Model, Step, on_host
from parallel.nn.tensor import gathered
from parallel.step import in_groups
from parallel.text import Tokens

ROW_AXES = ("data", "expert")  # along which ranks have different texts
AXES = (*ROW_AXES, "tensor")
ALGORITHM = "ring"  # for the gather of logits
FIRST, NEXT = "prompt", "token"  # the phases


class Pass(NamedTuple):
    """One forward pass: its phase, the tokens of each row that it reads, and its cost."""

    phase: str
    num_tokens: int
    seconds: float = 0.0
    bytes_read: int = 0  # of weights, by this rank


class Inference:
    """Forward passes of a model over some texts; each continues where the last one ended.

    Parameters
    ----------
    mesh : Mesh
        A mesh with any of the axes ``data``, ``expert`` and ``tensor``.
    model : Model
        A `gpt` or `moe.moe_gpt` made with this mesh, whose last two layers are ``head`` and
        ``loss``.
    parameters : mapping of str to array
        This rank's part of each unit (`Model.draw`, or `checkpoint.load_parameters`), in host
        memory.
    num_rows : int
        The number of texts of all ranks, at least 1.
    phase : function
        Marks the phases ``"prompt"`` and ``"token"``; by default `collectives.phase`.

    Attributes
    ----------
    rows : range
        The texts of this rank.
    passes : list of Pass
        The passes made so far.
    cache : KeyValues
        The keys and values of the tokens read so far.

    Raises
    ------
    ValueError
        If the mesh has another axis, along which ranks would divide a text or the layers; if the
        model reads no tokens; and for a number out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from parallel import Mesh, gpt
    >>> from parallel.inference import Inference
    >>> model = gpt(num_layers=1, hidden=8, num_heads=2, context=16)
    >>> parameters = {unit: model.draw(unit, seed=0) for unit in model.units}
    >>> inference = Inference(Mesh(None), model, parameters, num_rows=1)
    >>> inference.forward(np.array([[72, 101, 108]])).shape
    (1, 256)
    >>> inference.forward(np.array([[108]])).shape, inference.num_read
    ((1, 256), 4)
    """

    def __init__(
        self,
        mesh: Mesh,
        model: Model,
        parameters: Mapping[str, Array],
        num_rows: int,
        *,
        phase: PhaseFunction = collectives.phase,
    ) -> None:
        wrong = [axis for axis, size in mesh.axes.items() if size > 1 and axis not in AXES]
        if wrong:
            raise ValueError(
                f"ranks along {wrong[0]!r} have no texts of their own and no part of each weight:"
                f" text is generated along {', '.join(AXES)}"
            )
        embedding = model.layers.get("embedding")
        if not isinstance(embedding, Embedding):
            raise ValueError("a model without a layer embedding, of tokens, generates no text")
        if num_rows < 1:
            raise ValueError(f"there are {num_rows} texts to continue: it must be at least 1")
        self.mesh, self.model, self.parameters, self.phase = mesh, model, parameters, phase
        self.of_rank = tuple(self._rows_of(num_rows, rank) for rank in range(mesh.size))
        self.rows = self.of_rank[mesh.rank]
        self.passes: list[Pass] = []
        self.cache, self.num_read, self.bytes_read = KeyValues(), 0, 0
        self.context, self.vocab_size = embedding.context, embedding.vocab_size
        self.itemsize = next(iter(parameters.values())).dtype.itemsize
        for axis in (*model.comm_axes, *self._tensor):
            mesh[axis]  # makes its communicator now

    def _rows_of(self, num_rows: int, rank: int) -> range:
        axes = [axis for axis in ROW_AXES if axis in self.mesh.axes]
        if not axes:
            return range(num_rows)
        part = span(num_rows, self.mesh.size_of(axes), self.mesh.index(axes, rank))
        return range(part.start, part.stop)

    @property
    def _tensor(self) -> tuple[str, ...]:
        return ("tensor",) if self.mesh.axes.get("tensor", 1) > 1 else ()

    # A pass

    def forward(self, tokens: Tokens) -> np.ndarray[Any, Any]:
        """Read the next `tokens`; return the logits of the token after them, (rows, vocabulary).

        All ranks call this, with equally many tokens for each of their `rows`: int64 (rows,
        tokens).  Raises ValueError if the model has no positions for so many tokens.
        """
        self.check(tokens.shape[1])
        began, self.bytes_read = time.perf_counter(), 0
        label = NEXT if self.passes else FIRST
        with self.phase(label):
            logits = on_host(self._gathered(self._last_logits(tokens)))
        self.num_read += tokens.shape[1]
        seconds = time.perf_counter() - began
        self.passes.append(Pass(label, tokens.shape[1], seconds, self.bytes_read))
        return logits

    def check(self, num_tokens: int) -> None:
        """Raise ValueError if the model has no positions for `num_tokens` more tokens."""
        if not 0 < num_tokens <= self.context - self.num_read:
            raise ValueError(
                f"{num_tokens} tokens after {self.num_read}: the model reads at least 1 at a time,"
                f" and has positions for {self.context}"
            )

    def _last_logits(self, tokens: Tokens) -> Array:
        """Return the logits after the last token, for this rank's part of the vocabulary."""
        *names, _ = self.model.layers  # without the loss
        number = tokens.shape[1]
        step = Step(
            tokens=tokens,
            context=number,
            batch=self._batch(),
            positions=np.arange(self.num_read, self.num_read + number),
            cache=self.cache,
        )
        x: Array = tokens
        for name in names:
            self.model.bind(name, self.parameters)
            self.bytes_read += self.dense_bytes(name, number) if len(tokens) else 0
            with self._phase_of(name):
                x, _ = self.model.layers[name].forward(x, step)
        return x[:, -1]

    def _batch(self) -> BatchRows:
        return BatchRows(len(self.passes), self.of_rank, None)

    def _phase_of(self, name: str) -> AbstractContextManager[None]:
        return collectives.phase(name) if self.model.mesh.size > 1 else nullcontext()

    def _gathered(self, logits: Array) -> Array:
        """Return the logits of all ranks along ``tensor``, which have parts of the vocabulary."""
        comm = self.mesh[self._tensor] if self._tensor else None
        if comm is None:
            return logits
        with collectives.phase("logits"):
            return gathered(comm, logits, 1, self._parts(), ALGORITHM)

    def _parts(self) -> tuple[int, ...]:
        return tuple(even_counts(self.vocab_size, self.mesh.size_of(self._tensor)))

    # Bytes read and sent

    def dense_bytes(self, name: str, num_tokens: int, rank: int | None = None) -> int:
        """Return the bytes of weights that a `rank` with texts reads in a layer, without experts.

        The default is this rank.  An embedding reads a row for each of `num_tokens` tokens of each
        text, and a row for each position; any other layer reads all of its parameters.
        """
        rank = self.mesh.rank if rank is None else rank
        layer = self.model.layers[name]
        if isinstance(layer, Embedding):
            vectors = num_tokens * (len(self.of_rank[rank]) + 1)
            return int(vectors * layer.dim * self.itemsize)
        specs = (spec for key, spec in layer.specs().items() if "experts" not in key.split("."))
        return int(self.itemsize * sum(math.prod(x.box(self.mesh, rank).shape) for x in specs))

    def traffic(self) -> list[PredictedCall]:
        """Return what the passes made so far send; layers with experts know their routing."""
        passes = enumerate(self.passes)
        return merged(call for number, one in passes for call in self._calls(number, one))

    def _calls(self, number: int, one_pass: Pass) -> Iterator[PredictedCall]:
        batch = BatchRows(number, self.of_rank, None)
        for rank in range(self.mesh.size):
            rows = len(self.of_rank[rank])
            tokens = ArraySpec.tokens(
                rows, one_pass.num_tokens, self.itemsize, rank=rank, batch=batch
            )
            *layers, _ = self.model.inputs(tokens).items()
            for name, entering in layers if self.model.mesh.size > 1 else ():
                calls = self.model.layers[name].traffic(entering).forward
                yield from in_groups(calls, self.mesh, rank, one_pass.phase, name)
            if self._tensor:
                counts = tuple(rows * n for n in self._parts())
                call = PredictedCall(
                    "logits", "all_gather", ALGORITHM, counts, self.itemsize, axis="tensor"
                )
                yield from in_groups([call], self.mesh, rank, one_pass.phase)


def choose(
    logits: np.ndarray[Any, Any], rows: Sequence[int], number: int, temperature: float, seed: int
) -> Tokens:
    """Return the next token of each row, int64 (rows,).

    The next token is the one with the largest of the `logits` (rows, vocabulary).  With a
    `temperature` above 0, it is drawn with probabilities proportional to exp(logit / temperature),
    as a function of the `seed`, the `number` of the token, and the numbers of the `rows`.
    """
    scores = np.asarray(logits, np.float64)
    if temperature:
        randoms = [np.random.default_rng([seed, number, row]) for row in rows]
        noise = [random.gumbel(size=scores.shape[1]) for random in randoms]
        scores = scores / temperature + np.reshape(noise, scores.shape)
    tokens: Tokens = np.argmax(scores, axis=1)
    return tokens


def generate(
    inference: Inference,
    prompts: Sequence[bytes],
    num_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[bytes]:
    """Return this rank's texts: each of its `prompts`, and `num_tokens` bytes after the longest.

    All ranks call this with the same arguments.  A text with a shorter prompt is continued while
    longer prompts are still read, so that all texts end together.  See `choose` for `temperature`
    and `seed`.

    Raises ValueError, before anything is sent, for an empty prompt, for a number out of range, and
    if the model has no positions for the whole texts.
    """
    check_request(inference, prompts, num_tokens, temperature)
    mine = [np.frombuffer(prompts[row], np.uint8).astype(np.int64) for row in inference.rows]
    total = max(map(len, prompts)) + num_tokens
    texts = np.zeros((len(mine), total), np.int64)
    for text, prompt in zip(texts, mine, strict=True):
        text[: len(prompt)] = prompt
    known = np.array([len(prompt) for prompt in mine], np.int64)
    first = min(map(len, prompts))
    for start, stop in zip([0, *range(first, total - 1)], range(first, total), strict=True):
        logits = inference.forward(texts[:, start:stop])
        chosen = choose(logits, inference.rows, stop, temperature, seed)
        is_new = known <= stop
        texts[is_new, stop] = chosen[is_new]
    return [text.astype(np.uint8).tobytes() for text in texts]


def check_request(
    inference: Inference, prompts: Sequence[bytes], num_tokens: int, temperature: float
) -> None:
    """Raise ValueError for arguments that `generate` cannot serve."""
    if len(prompts) != (number := max(rows.stop for rows in inference.of_rank)):
        raise ValueError(f"there are {len(prompts)} prompts for {number} texts")
    if not all(prompts):
        raise ValueError(f"prompt {[*map(len, prompts)].index(0)} is empty: give at least 1 byte")
    if num_tokens < 1:
        raise ValueError(f"{num_tokens} tokens to generate: it must be at least 1")
    if not 0 <= temperature < np.inf:
        raise ValueError(f"the temperature is {temperature}: it must be a finite number from 0 on")
    total = max(map(len, prompts)) + num_tokens
    if total > inference.context:
        raise ValueError(
            f"a prompt of {max(map(len, prompts))} bytes and {num_tokens} more are {total}: the"
            f" model has positions for {inference.context}"
        )
