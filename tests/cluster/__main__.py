"""Run a program on a cluster of this computer: ``python -m tests.cluster 4x2 400 -m bench ...``.

The arguments are the hosts and the ranks of each, the rate of their links in Mbit/s, and the
program.  After the rate may come the bytes that an idle link lets through at once: ``200:1600``.
"""

from __future__ import annotations

import sys

from tests.cluster.network import cluster


def main(arguments: list[str]) -> int:
    """Run it, and return its exit status."""
    shape, rate, *command = arguments
    num_hosts, per_host = map(int, shape.split("x"))
    with cluster(num_hosts, per_host, *map(int, rate.split(":"))) as made:
        done = made.run(command, timeout=3600)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
