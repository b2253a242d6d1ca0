"""A cluster on one computer: each host is a network namespace, with a link of a known rate.

Needs Linux, root and iproute2.  The namespaces, and all processes in them, are removed at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from collectives.launch.mpirun import find_mpirun

AGENT = Path(__file__).with_name("agent.sh")
NET = "10.77.0"
# With a large bucket links stay busy although ranks share cores.  With one of a single packet they
# are like real links for small messages, too.
BUCKET = 256 << 10
PACKET = 1514  # bytes of the largest, with its header
GSO_MAX_SIZE = 65536  # of Linux
PREFIX = "rc"  # of the names of all namespaces; then comes the process that made them
_NUMBERS = itertools.count(1)


class Cluster(NamedTuple):
    """`num_hosts` hosts with `per_host` ranks each; the names of all hosts begin with `name`."""

    name: str
    num_hosts: int
    per_host: int

    @property
    def size(self) -> int:
        return self.num_hosts * self.per_host

    @property
    def addresses(self) -> list[str]:
        return [f"{NET}.{number}" for number in range(1, self.num_hosts + 1)]

    def host(self, number: int) -> str:
        """The name of a host and of its namespace.  Its address ends in the same number."""
        return f"{self.name}-{number}"

    def run(
        self,
        command: Sequence[str],
        *,
        mpi_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = 100,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python *command`` on all ranks.  The launcher runs on the first host."""
        words = " ".join([*mpi_words(self), *mpi_args])
        launch = ["-m", "collectives.launch", "-n", str(self.size), "--timeout", str(timeout)]
        return subprocess.run(
            [*self.on(1), sys.executable, *launch, "--mpi-args", words, *command],
            env={**os.environ, **mpi_environment(), "CLUSTER": self.name, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout + 20,
            check=False,
        )

    def on(self, number: int) -> list[str]:
        """The words before a command that run it on a host."""
        name = self.host(number)
        enter = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", name, "unshare", "-u", "sh", "-c", enter, name]


def mpi_words(cluster: Cluster) -> list[str]:
    """The options of mpirun: the hosts, how to start processes there, and TCP between all ranks."""
    hosts = ",".join(f"{address}:{cluster.per_host}" for address in cluster.addresses)
    if find_mpirun().vendor != "openmpi":
        start = ["-launcher", "rsh", "-launcher-exec", str(AGENT)]
        return ["-localhost", cluster.addresses[0], *start, "-hosts", hosts]
    start = ["--mca", "plm_rsh_agent", str(AGENT), "--prtemca", "if_include", f"{NET}.0/24"]
    byte_transfer = "tcp,self" if cluster.per_host == 1 else "tcp,sm,self"
    tcp = ["--mca", "pml", "ob1,monitoring", "--mca", "btl", byte_transfer]
    crowded = ["--mca", "mpi_yield_when_idle", "1"]  # Open MPI takes hosts for computers
    return ["--host", hosts, *start, *tcp, *crowded, "--mca", "btl_tcp_if_include", f"{NET}.0/24"]


def mpi_environment() -> dict[str, str]:
    """Without this, UCX finds that all hosts share memory, and sends nothing over the network."""
    return {} if find_mpirun().vendor == "openmpi" else {"UCX_TLS": "tcp,self"}


@contextlib.contextmanager
def cluster(
    num_hosts: int, per_host: int = 1, mbit: int | None = None, bucket: int = BUCKET
) -> Iterator[Cluster]:
    """Make a cluster whose links carry `mbit` Mbit/s in each direction (None: no limit).

    `bucket`: the bytes that a link that was idle lets through at once.  Raises ValueError if no
    packet fits.
    """
    if bucket < PACKET:
        raise ValueError(f"a bucket of {bucket} bytes holds no packet of {PACKET} bytes")
    remove_abandoned()
    made = Cluster(f"{PREFIX}{os.getpid()}x{next(_NUMBERS)}", num_hosts, per_host)
    try:
        switch = made.host(0)
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, address in enumerate(made.addresses, 1):
            connect(made.host(number), address, switch, f"port{number}", mbit, bucket)
        yield made
    finally:
        remove(made.name)


def connect(host: str, address: str, switch: str, port: str, mbit: int | None, bucket: int) -> None:
    """Make a host, and its link to the switch."""
    ip("netns", "add", host)
    ip("-n", host, "link", "set", "lo", "up")
    ip("-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
    ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
    ip("-n", host, "link", "set", "eth0", "up")
    ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    if mbit is not None:
        for name, device in ((host, "eth0"), (switch, port)):
            shape = ["tbf", "rate", f"{mbit}mbit", "burst", f"{bucket}b", "latency", "20ms"]
            ip("-n", name, "link", "set", device, "gso_max_size", str(min(bucket, GSO_MAX_SIZE)))
            run("tc", "-n", name, "qdisc", "add", "dev", device, "root", *shape)


def why_not() -> str:
    """Why no cluster can be made here; empty if one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    try:
        with cluster(2, mbit=400):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)


def remove_abandoned() -> None:
    """Remove what processes that are no longer running have left."""
    for name in {each.partition("-")[0] for each in namespaces() if each.startswith(PREFIX)}:
        number = name.removeprefix(PREFIX).partition("x")[0]
        if number.isdecimal() and not Path("/proc", number).exists():
            remove(name)


def remove(name: str) -> None:
    """Remove the hosts and the switch of a cluster, and end all processes that run there."""
    for each in [each for each in namespaces() if each.startswith(f"{name}-")]:
        for process in ip("netns", "pids", each).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        ip("netns", "del", each)


def namespaces() -> list[str]:
    return [line.split()[0] for line in ip("netns", "list").splitlines()]


def ip(*words: str) -> str:
    return run("ip", *words)


def run(*words: str) -> str:
    """The output of a command.  Raises OSError or CalledProcessError."""
    return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout
