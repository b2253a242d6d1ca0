"""Run a Python script or module on N ranks, under the MPI of this environment."""

import sys

from collectives.launch import bootstrap
from collectives.launch.command import COMMAND
from collectives.launch.rank_program import run_rank

if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        bootstrap.enter(int(sys.argv[2]))
        run_rank(sys.argv[3:])
    else:
        sys.exit(COMMAND.main())
