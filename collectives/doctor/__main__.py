"""Say whether the library works here, and what is slow: ``python -m collectives.doctor``.

By itself it looks at the environment and runs a job of two ranks.  Under mpirun or srun it looks at
that job: hosts, versions, threads, links.  The exit status is 0 if it would work, and 1 if not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from collectives.doctor.device_pointers import best_way, device_pointers
from collectives.doctor.environment import environment
from collectives.doctor.findings import Finding, Level, good, verdict, wrong
from collectives.doctor.job import job, started

_SECONDS = 60.0  # for the job of two ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Report; the exit status."""
    if parser().parse_args(arguments).device_pointers:
        return report([device_pointers()])
    if started() is not None:
        found = job()
        return 0 if found is None else report(found)
    found = list(environment())
    if all(finding.level is not Level.WRONG for finding in found):
        found += [*_job_of_two(), best_way()]
    return report(found)


def report(found: Sequence[Finding]) -> int:
    """Write what was found, and return the exit status."""
    sys.stdout.writelines(f"{line}\n" for line in [*map(str, found), "", verdict(found)])
    return int(any(finding.level is Level.WRONG for finding in found))


def _job_of_two() -> Iterator[Finding]:
    """What a job of two ranks on this host shows."""
    from collectives.launch import launch  # noqa: PLC0415 - not needed under MPI

    done = launch(2, ["-m", "collectives.doctor"], timeout=_SECONDS, capture=True)
    lines = done.stdout.splitlines()
    levels = {level.value: level for level in Level}
    for line in lines:
        level, _, sentence = line.partition(" ")
        if level in levels:
            yield Finding(levels[level], sentence.strip())
    if done.returncode != 0 and not any(line.startswith(Level.WRONG.value) for line in lines):
        yield wrong(f"A job of two ranks ended with status {done.returncode}: {done.stderr}")
    elif done.returncode == 0:
        yield good("A job of two ranks has run.")


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parse = argparse.ArgumentParser("python -m collectives.doctor", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument(
        "--device-pointers",
        action="store_true",
        help="only say whether MPI takes addresses of GPU memory, as device='direct' needs; it is "
        "started without more options",
    )
    return parse


if __name__ == "__main__":
    sys.exit(main())
