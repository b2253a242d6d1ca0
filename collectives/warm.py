"""Compile ahead what programs are run by: ``python -m collectives.warm``.

Compiled code is kept on disk, so this takes some seconds once per machine and moments afterwards.
Without it the first collective that needs a function compiles it.
"""

from __future__ import annotations

import logging
import sys

from collectives.arrays import kernels
from collectives.engines import compiled


def main() -> int:
    """Compile the loop and the most used kernels.  0, also where programs are interpreted."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if (reason := compiled.why_not()) is not None:
        logging.warning("programs will be interpreted: %s", reason)
        return 0
    compiled.loop()
    for function, dtype in kernels.common():
        kernels.combine(function, dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
