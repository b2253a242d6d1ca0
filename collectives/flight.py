"""Show what the ranks of a job were doing, side by side: ``python -m collectives.flight DIR``."""

import sys

from collectives.diagnostics import hang_report

if __name__ == "__main__":
    sys.exit(hang_report.main())
