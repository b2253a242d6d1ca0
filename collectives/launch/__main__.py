"""Start an MPI job: ``python -m collectives.launch -n 4 script.py``."""

import sys

from collectives.launch import bootstrap
from collectives.launch.command import main
from collectives.launch.rank_program import run_rank

if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        bootstrap.enter(int(sys.argv[2]))
        run_rank(sys.argv[3:])
    else:
        sys.exit(main())
