"""elasticrun with a fault: ``faulty_elasticrun.py FAULT FLAGS... COMMAND...``, forked as forking_elasticrun.py is.

The fault is Python's source, which changes modules. It takes arguments of its own from ``sys.argv``. A driver that is
started again has it, too.
"""

from __future__ import annotations

import sys

from forking_elasticrun import run

if __name__ == "__main__":
    exec(sys.argv.pop(1), {"__name__": "fault"})
    sys.exit(run())
