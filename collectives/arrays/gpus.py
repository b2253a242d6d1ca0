"""The GPUs that CuPy finds in this process, and the one that a rank uses."""

from __future__ import annotations

import logging
from functools import cache

_log = logging.getLogger(__name__)


def num_gpus() -> tuple[int, str]:
    """Return how many GPUs CUDA_VISIBLE_DEVICES leaves this process; if none, also the reason."""
    try:
        import cupy  # noqa: PLC0415 - it is optional

        return cupy.cuda.runtime.getDeviceCount(), ""
    except ImportError:
        return 0, "CuPy is not installed"
    except Exception as error:  # noqa: BLE001 - CuPy has an error for each reason
        return 0, f"CuPy finds no GPU ({error})"


def use_gpu(local_rank: int, num_local_ranks: int) -> int:
    """Let CuPy use the GPU of a rank of this host, in this thread; return its number.

    If there are several, rank 0 of the host logs, once, which rank uses which.  Raises RuntimeError
    if there is none.
    """
    number, why_none = num_gpus()
    if why_none:
        raise RuntimeError(f"this rank can use no GPU: {why_none}")
    import cupy  # noqa: PLC0415 - it is there

    cupy.cuda.Device(local_rank % number).use()
    if number > 1 and local_rank == 0:
        _say_who_uses_which(num_local_ranks, number)
    return local_rank % number


@cache
def _say_who_uses_which(num_local_ranks: int, number: int) -> None:
    gpus = ", ".join(str(rank % number) for rank in range(num_local_ranks))
    message = "the ranks of this host use GPUs %s of those that each sees, by their local ranks"
    _log.warning(message, gpus)
