"""elasticrun that holds tracebacks until their processes have ended, however long that takes on a busy machine."""

from __future__ import annotations

import sys

from elastic_driver.cli import main as cli
from elastic_driver.report import tracebacks

tracebacks._HOLD_S = 150.0

if __name__ == "__main__":
    sys.exit(cli.main())
