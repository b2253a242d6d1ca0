"""Gather values of all ranks on rank 0."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from collectives import Communicator
from parallel import shards


def gather_json(comm: Communicator, value: Any) -> list[Any] | None:
    """Return every rank's value on rank 0, and None on others.  All ranks call this.

    The values consist of what JSON can represent, and may have any length.
    """
    mine = json.dumps(value).encode()
    sizes = comm.all_gather(np.array([len(mine)])).tolist()
    gathered = comm.gather(np.frombuffer(mine, np.uint8), counts=sizes)
    if gathered is None:
        return None
    return [json.loads(bytes(each)) for each in shards.split(gathered, sizes)]
