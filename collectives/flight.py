"""Show what the ranks of a job were doing, side by side: ``python -m collectives.flight DIR``."""

import sys

from collectives.diagnostics.hang_report import main

if __name__ == "__main__":
    sys.exit(main())
