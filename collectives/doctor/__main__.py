"""Say whether the library works here, and what is slow.

By itself it looks at the environment and runs a job of two ranks.  Under mpirun or srun it looks at
that job: hosts, versions, threads, links.  The exit status is 0 if it would work, and 1 if not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from collectives.console import Command, add_json, console_for, write_json
from collectives.doctor.device_pointers import best_way, device_pointers
from collectives.doctor.environment import environment
from collectives.doctor.findings import Finding, Level, good, verdict, wrong
from collectives.doctor.job import job, started

_SECONDS = 60.0  # for the job of two ranks


def run(options: argparse.Namespace) -> int:
    """Report what works here and what does not; return the exit status."""
    if options.device_pointers:
        return report([device_pointers()], options)
    if started() is not None:
        findings = job()
        return 0 if findings is None else report(findings, options)
    findings = list(environment())
    if all(finding.level is not Level.WRONG for finding in findings):
        findings += [*_job_of_two(), best_way()]
    return report(findings, options)


def report(findings: Sequence[Finding], options: argparse.Namespace) -> int:
    """Print the findings, or write them as JSON; return the exit status."""
    console = console_for(0, options)
    for line in [*map(str, findings), "", verdict(findings)]:
        console.print(line, soft_wrap=True)
    rows = [{"level": finding.level.value, "sentence": finding.sentence} for finding in findings]
    write_json({"findings": rows, "verdict": verdict(findings)}, options.json)
    return int(any(finding.level is Level.WRONG for finding in findings))


def _job_of_two() -> Iterator[Finding]:
    """Yield what a job of two ranks on this host shows."""
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


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parse.add_argument(
        "--device-pointers",
        action="store_true",
        help="only say whether MPI takes addresses of GPU memory, as device='direct' needs; it is "
        "started without more options",
    )
    add_json(parse)


COMMAND = Command("collectives.doctor", __doc__, add_options, run)


if __name__ == "__main__":
    sys.exit(COMMAND.main())
