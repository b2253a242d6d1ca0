"""Runs LogGOPSim on exported files, and writes what it says of small ones for CI.

    python -m tests.export.loggopsim

writes `loggopsim.json` and the files in `goal/` anew, from `txt2bin` and `LogGOPSim` on the path.
The times in the repository are those of github.com/spcl/LogGOPSim at commit
76451de16546c7ea39651c183cbc532f4a3457c0, built with its own Makefile and -O2.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from collectives.export import Call, write
from collectives.selection import even_parts, programs
from collectives.simulation import SAME_HOST, Link, Machine, simulate

HERE = Path(__file__).parent
RECORDED, FILES = HERE / "loggopsim.json", HERE / "goal"
NANOSECOND = 1e-9
COPY, COMBINE, CALL = 1, 2, 100  # nanoseconds of a byte, a byte, and a call


class Parameters(NamedTuple):
    """Those of LogGOPSim, in nanoseconds and bytes."""

    o: int
    O: int  # noqa: E741 - LogGOPSim's name
    L: int
    g: int
    G: int
    S: int

    def machine(self, unit: float) -> Machine:
        """The machine with these numbers; `unit` is the length of a nanosecond."""
        costs = {
            "overhead_seconds": self.o * unit,
            "overhead_seconds_per_byte": self.O * unit,
            "latency_seconds": self.L * unit,
            "gap_seconds": self.g * unit,
            "seconds_per_byte": self.G * unit,
        }
        links = (Link(up_to_bytes=self.S, **costs), Link(is_rendezvous=True, **costs))
        return Machine({SAME_HOST: links}, CALL * unit, COPY * unit, COMBINE * unit)


# Of a network with little overhead; of one where it counts, with other thresholds; of each byte.
PARAMETERS = (
    Parameters(500, 0, 2000, 300, 1, 65536),
    Parameters(1500, 0, 2500, 1000, 6, 1000),
    Parameters(200, 1, 1000, 2000, 2, 100),
)
RECORDED_CALLS = (
    Call("all_reduce", 4, 4096, "ring"),
    Call("all_reduce", 8, 64, "recursive_doubling"),
    Call("all_reduce", 7, 4096, "rabenseifner"),
    Call("all_reduce", 8, 4096, "double_binary_tree"),
    Call("all_reduce", 4, 4096, "circulant"),
    Call("all_gather", 4, 4096, "bruck"),
    Call("broadcast", 8, 4096, "binomial"),
    Call("broadcast", 4, 4096, "pipeline(segments=4)"),
    Call("reduce_scatter", 5, 640, "ring"),
    Call("all_to_all", 4, 640, "linear"),
    Call("barrier", 8, 0, "dissemination"),
)


def name_of(call: Call) -> str:
    """The name of a call's file."""
    label = re.sub(r"\W+", "_", str(call.algorithm)).strip("_")
    return f"{call.collective}-{label}-{call.size}-{call.num_bytes}"


def simulated(call: Call, parameters: Parameters) -> list[float]:
    """When each rank ends in our simulator, in nanoseconds.

    They are simulated as if they were seconds, so that all sums are whole numbers and exact.
    """
    return simulated_on(call, parameters.machine(1.0))


def simulated_on(call: Call, machine: Machine) -> list[float]:
    """When each rank ends in our simulator, in seconds."""
    counts = even_parts(call.collective, call.size, call.num_bytes)
    every = programs(call.collective, call.size, counts, algorithm=call.algorithm, root=call.root)
    times: list[float] = simulate(every, machine).rank_seconds.tolist()
    return times


def run(goal: Path, parameters: Parameters) -> list[int]:
    """When each rank ends in LogGOPSim, in nanoseconds; of more than 16 ranks only the last."""
    with TemporaryDirectory() as folder:
        binary = Path(folder) / "goal.bin"
        started(["txt2bin", "-i", str(goal), "-o", str(binary)])
        options = [f"-{name}{value}" for name, value in parameters._asdict().items()]
        output = started(["LogGOPSim", "-f", str(binary), *options])
    nanoseconds = re.findall(r"(?:Host \d+|finishing time at host \d+): (\d+)", output)
    assert nanoseconds, output
    return list(map(int, nanoseconds))


def started(command: list[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


def exported(call: Call, parameters: Parameters, path: Path) -> Path:
    """The file of a call, whose computations take whole nanoseconds."""
    return write(call.tasks(parameters.machine(NANOSECOND)), "goal", path)[0]


def main() -> int:
    """Write the files and what LogGOPSim says of them."""
    FILES.mkdir(exist_ok=True)
    times: dict[str, Any] = {}
    for call in RECORDED_CALLS:
        path = exported(call, PARAMETERS[0], FILES / f"{name_of(call)}.goal")
        times[name_of(call)] = [run(path, parameters) for parameters in PARAMETERS]
    settings = [parameters._asdict() for parameters in PARAMETERS]
    text = json.dumps({"parameters": settings, "times": times})
    RECORDED.write_text(text.replace('"times"', '\n"times"').replace("]], ", "]],\n") + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
