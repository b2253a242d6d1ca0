"""Where in a training step a call is made: in which module, bucket or optimizer step.

Calls come from hooks of PyTorch, in the forward pass, and in the backward pass possibly from
threads of autograd.  What labels a call is found when the call is made, in this order:

1. FSDP gathers or reduces the parameters of a module: that module.
2. A communication hook of DDP, or DDP itself, reduces a bucket: the number of the bucket.
3. A module of the recorded model is in its forward pass, or autograd computes the gradient of what
   that module has computed: that module.
4. An optimizer is in its step.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import torch

from collectives.diagnostics import current_phase

_FSDP = "_fsdp_param_group.py"
_AUTOGRAD = "torch/autograd/graph.py"
_OPTIMIZER = "torch/optim/optimizer.py"
_OWN = "collectives/torch/backend.py"
# Parts of names that wrappers add.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Scopes:
    """What is known of the modules of a model while it is recorded."""

    def __init__(self) -> None:
        self._here = _Stack()
        # The number of the first autograd node that is made in a module, and the module's name.
        self._first_nodes: list[int] = []
        self._names: list[str] = []
        self._outer = ""  # the phase of the forward pass, which threads of autograd do not know
        self._backward, self._num_buckets = -1, 0

    @contextmanager
    def following(self, *models: torch.nn.Module) -> Iterator[None]:
        """Follow the modules of these models inside the block."""
        with ExitStack() as stack:
            for model in models:
                for name, module in model.named_modules():
                    stack.enter_context(self._followed(module, _short(name)))
            yield

    @contextmanager
    def _followed(self, module: torch.nn.Module, name: str) -> Iterator[None]:
        """Follow one module; its own hooks, which may communicate, count as a part of it."""
        label = f"forward/{name}" if name else "forward"
        begin = module.register_forward_pre_hook(lambda *_: self._enter(label), prepend=True)
        end = module.register_forward_hook(lambda *_: self._leave(), always_call=True)
        try:
            yield
        finally:
            begin.remove()
            end.remove()

    def _enter(self, name: str) -> None:
        self._outer = current_phase()
        self._here.names.append(name)
        self._note_nodes(name)

    def _leave(self) -> None:
        self._here.names.pop()
        self._note_nodes(self._here.names[-1] if self._here.names else "")

    def _note_nodes(self, name: str) -> None:
        """Note that the next autograd nodes are made in this module."""
        if len(self._names) > 1 << 20:
            self._names.clear()
            self._first_nodes.clear()
        self._first_nodes.append(torch._C._autograd._get_sequence_nr())
        self._names.append(name)

    def phase(self) -> str:
        """Return the label of a call that this thread makes now."""
        is_backward = torch._C._current_graph_task_id() != -1
        inner = _of_fsdp() or (self._of_bucket() if is_backward else "")
        if not inner:
            inner = self._here.names[-1] if self._here.names else ""
            inner = inner or (self._of_node() if is_backward else _of_optimizer())
        if is_backward:
            inner = "/".join(["backward", *inner.split("/")[1:]])
        outer = current_phase() or (self._outer if is_backward else "")
        return f"{outer}/{inner}" if outer and inner else outer or inner

    def _of_node(self) -> str:
        """Return the module whose forward pass has made the node that autograd computes now."""
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        index = bisect_right(self._first_nodes, node._sequence_nr()) - 1
        return self._names[index] if index >= 0 else ""

    def _of_bucket(self) -> str:
        """Return the label of the bucket that DDP reduces; "" if DDP does not call."""
        frame = _caller()
        if frame is None or frame.f_code.co_filename.endswith(_AUTOGRAD):
            return self._next_bucket()  # C++ has called, from the graph of autograd
        while frame is not None and not frame.f_code.co_filename.endswith(_AUTOGRAD):
            bucket = frame.f_locals.get("bucket")
            if isinstance(bucket, torch.distributed.GradBucket):
                return f"backward/bucket {bucket.index()}"
            frame = frame.f_back
        return ""

    def _next_bucket(self) -> str:
        """Return the label of the next bucket of this backward pass: DDP reduces them in order."""
        task = torch._C._current_graph_task_id()
        self._num_buckets = self._num_buckets + 1 if task == self._backward else 0
        self._backward = task
        return f"backward/bucket {self._num_buckets}"


class _Stack(threading.local):
    """The labels of the scopes that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.names: list[str] = []


def _short(name: str) -> str:
    """Return the name of a module without what wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _caller() -> FrameType | None:
    """Return the innermost frame outside the backend.

    There is none if C++ has called the backend on a thread of its own.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(_OWN):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.endswith(_OWN):
        frame = frame.f_back
    return frame


def _caller_in(file: str) -> FrameType | None:
    """Return the innermost frame outside the backend that is in this file."""
    frame = _caller()
    while frame is not None and not frame.f_code.co_filename.endswith(file):
        frame = frame.f_back
    return frame


def _of_fsdp() -> str:
    """Return the label of the module whose parameters FSDP sends; "" if FSDP does not call."""
    frame = _caller_in(_FSDP)
    if frame is None:
        return ""
    name = getattr(frame.f_locals.get("self"), "_module_fqn", None)
    return f"forward/{_short(name)}" if name else "forward"


def _of_optimizer() -> str:
    """Return the label of the step of an optimizer; "" outside of one."""
    return "" if _caller_in(_OPTIMIZER) is None else "optimizer"
