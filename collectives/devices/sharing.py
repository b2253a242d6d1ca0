"""Tells the user, once, of ranks that share a GPU although others are left."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache

_log = logging.getLogger(__name__)


def tell_of_sharing(uuids: Mapping[int, bytes], num_devices: int) -> None:
    """Log a warning if ranks of a host share a GPU, and use fewer GPUs than a process can.

    Parameters
    ----------
    uuids : mapping of int to bytes
        The id of the GPU of each rank.
    num_devices : int
        The number of GPUs that this process can use.
    """
    num_used = len(set(uuids.values()))
    if num_used < min(num_devices, len(uuids)):
        warn_once(len(uuids), num_used, num_devices)


@cache
def warn_once(*numbers: int) -> None:
    """Log the warning, once for the same numbers."""
    message = (
        "%d ranks of this host use %d of the %d GPUs that CUDA_VISIBLE_DEVICES leaves: call "
        "comm.use_gpu() before arrays are made, or launch with --gpus-per-rank"
    )
    _log.warning(message, *numbers)
