"""elasticrun in a session of its own, as on a terminal of its own, forked as forking_elasticrun.py is."""

from __future__ import annotations

import os
import sys

from forking_elasticrun import run

if __name__ == "__main__":
    os.setsid()
    sys.exit(run())
