"""The command ``python -m collectives.flight DIR``: line up what the ranks of a job were doing."""

import sys

from collectives.diagnostics.hang_report import main

if __name__ == "__main__":
    sys.exit(main())
